// ----------------------------------------------------------------------------------------- summary

/** What was run, on what, and how. */
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
    ["made", `${date}, graphllm ${made.graphllm}, Python ${made.python}`],
    ["settings", h("ul", { class: "settings" }, given)],
  ];
  return [
    h("h1", {}, model.type), p("facts", about.join(" \u00b7 ")),
    h("dl", { class: "machine" },
      lines.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
  ];
}

/** One phase: the speed of its passes without profiling, and where the wall time went. */
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
    closing(phase));
}

/** What disturbed the passes, or nothing. */
const busy = () => (report.busy.note ? p("note busy", report.busy.note) : null);

const PARTS = ["ops", "copies", "gaps", "host", "unattributed"];

/** The wall time as one bar, and its parts in numbers: they add up to it. */
function closing(phase) {
  const spent = (name) => Math.max(0, phase.closing[name]);
  const all = PARTS.reduce((sum, name) => sum + spent(name), 0) || 1;
  const piece = (name) =>
    h("i", { "--share": `${(100 * spent(name)) / all}%`, "--fill": `var(--${name})` });
  const line = (name) => tr([swatch(`var(--${name})`), name],
    [phase.each(phase.closing[name]), percent(phase.closing[name] / phase.wall)]);
  return h("div", { class: "closing" },
    h("div", { class: "stack", role: "img", "aria-label": "where the wall time went" },
      PARTS.filter(spent).map(piece)),
    listing("", ["where it went", `${phase.unit}/token`, "of wall"], PARTS.map(line)));
}

const START = {
  load_s: "loading the model", weights_s: "of which weights", kernels_s: "of which kernels",
  first_run_s: "the first run, beyond a later one",
};

/** What was over before the first timed token, and what limits are computed from. */
function start() {
  const own = Object.keys(START).filter((key) => typeof report.start[key] === "number");
  const rows = own.map((key) => tr(START[key], [fixed(report.start[key], 2)]));
  return h("article", { class: "card" }, h("h2", {}, "before that, and limits"),
    rows.length ? listing("", ["not in these times", "seconds"], rows) : null, ceilings());
}

function ceilings() {
  const giga = (rate) => (rate ? short(rate / 1e9) : "");
  const rows = Object.entries(report.ceilings).map(([name, roof]) => {
    const date = h("small", {}, ` ${roof.date.slice(0, 10)}`);
    return tr([name, date, roof.doubt ? h("em", {}, ` ${roof.doubt}`) : null],
      [giga(roof.bytes_s), giga(roof.float_flop_s), giga(roof.integer_flop_s)]);
  });
  if (rows.length) return listing("", ["ceilings", "GB/s", "float GFLOP/s", "integer"], rows);
  return p("note", "No ceilings are known, so there are no limits: ",
    h("code", {}, "graphllm doctor --measure"), " finds them.");
}
