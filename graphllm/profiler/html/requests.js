// ---------------------------------------------------------------------------------------- requests

const SLICES = 12; // ops of a request with a part of the bar of their own

/** Table of what each request of a phase costs, per pass, with its time by op as a bar. */
function requestTable(phase) {
  const count = phase.passes.length, costs = phase.requests;
  const longest = Math.max(...costs.map((cost) => cost.ns)) || 1;
  const values = (cost) => [
    fixed(cost.tokens / count), fixed(cost.ns / count / 1e6, 3), percent(cost.ns / phase.wall),
    short(cost.flops / count / 1e9), short(cost.bytes / count / 1e6),
  ];
  const line = (cost) => tr(fixed(cost.request), [...values(cost), timeBar(cost, count, longest)]);
  const sum = (name) => costs.reduce((total, cost) => total + cost[name], 0);
  const names = ["tokens", "ns", "flops", "bytes"];
  const all = Object.fromEntries(names.map((name) => [name, sum(name)]));
  return listing("requests", ["request", "tokens", "ms", "of wall", "GFLOP", "MB", "time by op"],
    costs.slice(0, LINES).map(line), tr("all", [...values(all), ""]));
}

/** Time of a request: its largest ops, its other ops, and its shares of gaps and host time. */
function timeBar(cost, passes, longest) {
  const ops = cost.ops.map(([text, ns]) => [texts[text], ns]).sort((a, b) => b[1] - a[1]);
  const rest = ops.slice(SLICES).reduce((total, [, ns]) => total + ns, 0);
  const slices = [
    ...ops.slice(0, SLICES).map(([name, ns]) => [name, ns, fillOf(name.split(" ")[0])]),
    ["other ops", rest, `var(--c${HUES})`],
    ["gaps", cost.gaps, "var(--gaps)"], ["host", cost.host, "var(--host)"],
  ].filter(([, ns]) => ns > 0);
  const slice = ([name, ns, fill]) => h("i", {
    "--share": `${(100 * ns) / longest}%`, "--fill": fill, onpointerleave: tip.left,
    onpointerenter: (event) => tip.show(name,
      [["time", time(ns / passes)], ["of the request", percent(ns / cost.ns)]],
      event.clientX, event.clientY),
  });
  const label = slices.slice(0, 3).map(([name, ns]) => `${name} ${percent(ns / cost.ns)}`);
  return h("div", { class: "stack", role: "img", "aria-label": label.join(", ") },
    slices.map(slice));
}
