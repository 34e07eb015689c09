// --------------------------------------------------------------------------------------- placement

/** Ops and backends, why steps missed the first of them, and what was copied. */
function placement(phase) {
  const used = new Set(phase.rows.backend.map((text) => texts[text]));
  const known = Object.keys(report.machine.backends);
  const backends = [...known.filter((name) => used.has(name)), ...[...used].filter((name) => !known.includes(name))];
  const missed = tallied(phase, (row) => phase.text("why", row) &&
    `${phase.text("backend", row)}\n${phase.text("why", row)}`);
  const copied = tallied(phase, (row) => phase.rows.copy[row] &&
    `${phase.text("scope", row)}\n${phase.text("shape", row)}\n${phase.text("backend", row)}`);
  return [counts(phase, backends), misses(phase, backends, missed), copies(phase, copied)];
}

/** Rows summed by a text of several lines; those without one are left out. */
function tallied(phase, key) {
  const groups = new Map();
  for (let row = 0; row < phase.count; row++) {
    const own = key(row);
    if (!own) continue;
    if (!groups.has(own)) groups.set(own, new Group(own));
    groups.get(own).add(phase, row);
  }
  return [...groups.values()].sort((a, b) => b.ns - a.ns);
}

function counts(phase, backends) {
  const groups = tallied(phase, (row) => phase.text("op", row));
  const on = (group, name) => group.rows.filter((row) => phase.text("backend", row) === name).length;
  const all = (name) => groups.reduce((sum, group) => sum + on(group, name), 0);
  const cell = (count) => h("td", { class: count ? null : "zero" }, count ? fixed(count, 0) : "\u00b7");
  return h("div", { class: "wide" }, h("table", { class: "parts placed" },
    h("thead", {}, h("tr", {}, h("th", {}, "steps"), backends.map((name) => h("th", {}, name)),
      h("th", {}, "ms/token"))),
    h("tbody", {}, groups.slice(0, MANY).map((group) =>
      h("tr", {}, h("th", { scope: "row" }, group.key),
        backends.map((name) => cell(on(group, name))), h("td", {}, phase.msText(group.ns))))),
    h("tfoot", {}, h("tr", {}, h("th", { scope: "row" }, "all"),
      backends.map((name) => cell(all(name))), h("td", {}, phase.msText(phase.closing.ops + phase.closing.copies))))));
}

function misses(phase, backends, missed) {
  if (!missed.length) {
    return h("p", { class: "note" }, `Every step is on ${backends[0]}, the first backend that was asked.`);
  }
  const ops = (group) => {
    const own = new Map();
    for (const row of group.rows) {
      own.set(phase.text("op", row), (own.get(phase.text("op", row)) || 0) + 1);
    }
    return [...own].map(([op, count]) => (count > 1 ? `${op} \u00d7 ${count}` : op)).join(", ");
  };
  return h("div", {}, h("h3", {}, "not on the first backend"),
    h("ul", { class: "list" }, missed.slice(0, MANY).map((group) => {
      const [backend, why] = group.key.split("\n");
      return h("li", {}, h("b", {}, `on ${backend}`), ` ${why}`,
        h("small", {}, `${ops(group)}: ${phase.msText(group.ns)} ms a token`));
    })));
}

function copies(phase, copied) {
  if (!copied.length) return h("p", { class: "note" }, "Nothing is copied between memories.");
  return h("div", {}, h("h3", {}, "copies between memories"),
    h("ul", { class: "list" }, copied.slice(0, MANY).map((group) => {
      const [scope, shape, backend] = group.key.split("\n");
      const size = bytes(group.bytes / group.calls);
      return h("li", {}, h("b", {}, `to ${backend}`), ` ${shape} `, h("code", {}, scope),
        h("small", {}, `${plural(group.rows.length, "step")}, ${size} each, ` +
          `${phase.msText(group.ns)} ms a token`));
    })));
}
