// ----------------------------------------------------------------------------------------- summary

/** What the wall time is divided into: [key of `closing`, name, colour]. */
const PARTS = [
  ["ops", "ops", "--ops"], ["copies", "copies", "--copies"], ["gaps", "gaps", "--gaps"],
  ["host", "host", "--host"], ["unattributed", "unattributed", "--rest"],
];

function heading() {
  const { model, machine, made, settings } = report;
  const size = `${scaled(model.parameters, ["", "k", "M", "B"]).replace(" ", "\u202f")} parameters`;
  const about = [model.path, size, bytes(model.bytes), `context ${fixed(model.context, 0)}`,
    `cache ${model.kv_type}`];
  const given = Object.entries(settings).map(([name, value]) =>
    h("li", {}, `${name.replaceAll("_", " ")} `, h("b", {}, String(value))));
  return [
    h("h1", {}, model.type),
    h("p", { class: "facts" }, about.join(" \u00b7 ")),
    h("dl", { class: "machine" },
      h("dt", {}, "machine"), h("dd", {}, machine.name),
      Object.entries(machine.backends).map(([name, text]) =>
        [h("dt", {}, name), h("dd", {}, text)]),
      h("dt", {}, "made"),
      h("dd", {}, `${made.date.replace("T", " ").replace("Z", " UTC")}, ` +
        `graphllm ${made.graphllm}, Python ${made.python}`),
      h("dt", {}, "settings"), h("dd", {}, h("ul", { class: "settings" }, given))),
  ];
}

function figure(value, unit) {
  return h("p", { class: "figure" }, h("b", {}, value), ` ${unit}`);
}

/** One phase: its rate, its spread over the passes, and where the wall time went. */
function card(phase) {
  const one = (ns) => fixed(ns / 1e6 / phase.tokens, phase.decimals);
  const rate = (1e9 * phase.tokens) / phase.median;
  const range = phase.walls.length > 1
    ? `, ${one(phase.walls[0])} to ${one(phase.walls[phase.walls.length - 1])} over the passes` : "";
  return h("article", { class: "card" },
    h("h2", {}, phase.name),
    figure(rate >= 1000 ? fixed(rate, 0) : short(rate), "tokens a second"),
    h("p", {}, h("b", {}, one(phase.median)), ` ms a token${range}`),
    h("p", {}, `${plural(phase.tokens, "token")}, ${plural(phase.passes.length, "pass", "passes")}; ` +
      `noting times cost ${percent(phase.overhead)}`),
    closing(phase));
}

/** The wall time as one bar, and its parts in words: they add up to it. */
function closing(phase) {
  const parts = PARTS.map(([key, name, colour]) => ({ name, colour, ns: phase.closing[key] }));
  const positive = parts.reduce((sum, part) => sum + Math.max(0, part.ns), 0) || 1;
  return h("div", { class: "closing" },
    h("div", { class: "stack", role: "img", "aria-label": "where the wall time went" },
      parts.filter((part) => part.ns > 0).map((part) =>
        h("i", { "--share": `${(100 * part.ns) / positive}%`, "--fill": `var(${part.colour})` }))),
    h("table", { class: "parts" },
      h("thead", {}, h("tr", {}, h("th", {}, "where it went"), h("th", {}, "ms/token"),
        h("th", {}, "of wall"))),
      h("tbody", {}, parts.map((part) =>
        h("tr", {},
          h("th", { scope: "row" }, h("i", { class: "swatch", "--fill": `var(${part.colour})` }),
            part.name),
          h("td", {}, phase.msText(part.ns)), h("td", {}, percent(part.ns / phase.wall)))))));
}

const START = [
  ["load_s", "loading the model"], ["weights_s", "weights"], ["kernels_s", "kernels"],
  ["first_run_s", "the first run, beyond a later one"],
];

/** What was over before the first timed token, and what limits are computed from. */
function start() {
  const own = START.filter(([key]) => typeof report.start[key] === "number");
  return h("article", { class: "card" }, h("h2", {}, "before that, and limits"),
    own.length ? h("table", { class: "parts" },
      h("thead", {}, h("tr", {}, h("th", {}, "not in these times"), h("th", {}, "seconds"))),
      h("tbody", {}, own.map(([key, name]) =>
        h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, fixed(report.start[key], 2))))))
      : null, ceilings());
}

function ceilings() {
  const known = Object.entries(report.ceilings);
  if (!known.length) {
    return h("p", { class: "note" }, "No ceilings are known, so there are no limits: ",
      h("code", {}, "graphllm doctor --measure"), " finds them.");
  }
  const giga = (rate) => h("td", {}, rate ? short(rate / 1e9) : "");
  return h("div", { class: "wide" }, h("table", { class: "parts" },
    h("thead", {}, h("tr", {}, h("th", {}, "ceilings"), h("th", {}, "GB/s"),
      h("th", {}, "float GFLOP/s"), h("th", {}, "integer"))),
    h("tbody", {}, known.map(([name, roof]) =>
      h("tr", {}, h("th", { scope: "row" }, name, h("small", {}, ` ${roof.date.slice(0, 10)}`),
        roof.stale ? h("em", {}, " stale") : null),
      giga(roof.bytes_s), giga(roof.float_flop_s), giga(roof.integer_flop_s))))));
}
