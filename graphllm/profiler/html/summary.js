// ----------------------------------------------------------------------------------------- summary

/** Heading: model, machine and settings. */
function heading() {
  const { model, machine, made, settings } = report;
  const about = [
    model.path.split("/").pop(), `${scaled(model.parameters, ["", "k", "M", "B"])} parameters`,
    bytes(model.bytes), `context ${fixed(model.context)}`, `cache ${model.kv_type}`,
  ];
  const date = made.date.replace("T", " ").replace(/Z|\+00:00/, " UTC");
  const given = Object.entries(settings).map(([name, value]) => [name, String(value ?? "")])
    .filter(([, value]) => value).map(([name, value]) =>
      h("li", {}, `${name.replaceAll("_", " ")} `, h("b", {}, value)));
  const lines = [
    ["machine", machine.name], ...Object.entries(machine.backends),
    ["date", `${date}, graphllm ${made.graphllm}, Python ${made.python}`],
    ["settings", h("ul", { class: "settings" }, given)],
  ];
  return [
    h("h1", {}, model.type), p("facts", about.join(" \u00b7 ")),
    h("dl", { class: "machine" },
      lines.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
  ];
}

/** Card of a phase: speed of the passes without profiling, and accounting of the wall time. */
function card(phase) {
  const { speed, tokens } = phase;
  const spread = speed.passes > 1 ? ` \u00b1 ${percent(speed.spread)}` : "";
  return h("article", { class: "card" },
    h("h2", {}, phase.name),
    p("figure", h("b", {}, speed.tok_s >= 1000 ? fixed(speed.tok_s) : short(speed.tok_s)),
      " tokens per second", spread),
    p("", h("b", {}, phase.each(speed.median_ns * phase.passes.length)),
      ` ${phase.unit} per token`),
    p("", `${plural(tokens, "token")}, ${plural(speed.passes, "pass", "passes")}; ` +
      `profiling overhead ${percent(phase.overhead)}`),
    accounting(phase));
}

/** Note on what disturbed the passes, if anything did. */
const busy = () => (report.busy.note ? p("note busy", report.busy.note) : null);

const PARTS = ["ops", "copies", "gaps", "host", "unattributed"];

/** Accounting of the wall time: a stacked bar and a table. */
function accounting(phase) {
  const spent = (name) => Math.max(0, phase.closing[name]);
  const all = PARTS.reduce((sum, name) => sum + spent(name), 0) || 1;
  const piece = (name) =>
    h("i", { "--share": `${(100 * spent(name)) / all}%`, "--fill": `var(--${name})` });
  const line = (name) => tr([swatch(`var(--${name})`), name],
    [phase.each(phase.closing[name]), percent(phase.closing[name] / phase.wall)]);
  return h("div", { class: "accounting" },
    h("div", { class: "stack", role: "img", "aria-label": "accounting of the wall time" },
      PARTS.filter(spent).map(piece)),
    listing("", ["wall time", `${phase.unit}/token`, "share"], PARTS.map(line)));
}

const START = {
  load_s: "loading the model", weights_s: "of which preparing weights",
  kernels_s: "of which compiling kernels", first_run_s: "first run, excess over later ones",
};

/** Card with one-time costs before the passes, and the ceilings of the backends. */
function start() {
  const own = Object.keys(START).filter((key) => typeof report.start[key] === "number");
  const rows = own.map((key) => tr(START[key], [fixed(report.start[key], 2)]));
  return h("article", { class: "card" }, h("h2", {}, "startup and ceilings"),
    rows.length ? listing("", ["startup", "seconds"], rows) : null, ceilings());
}

function ceilings() {
  const giga = (rate) => (rate ? short(rate / 1e9) : "");
  const rows = Object.entries(report.ceilings).map(([name, roof]) => {
    const date = h("small", {}, ` ${roof.date.slice(0, 10)}`);
    return tr([name, date, roof.doubt ? h("em", {}, ` ${roof.doubt}`) : null],
      [giga(roof.bytes_s), giga(roof.float_flop_s), giga(roof.integer_flop_s)]);
  });
  if (rows.length) return listing("", ["ceilings", "GB/s", "float GFLOP/s", "integer"], rows);
  return p("note", "No ceilings were measured. Run ",
    h("code", {}, "graphllm doctor --measure"), " to measure them.");
}
