// --------------------------------------------------------------------------------------- placement

const LINES = 200; // maximum of a list

/** Ops by backend, reasons for misses of the first backend, and copies between memories. */
function placement(phase) {
  const used = new Set(phase.rows.backend.map((text) => texts[text]));
  const backends = [...new Set([...Object.keys(report.machine.backends), ...used])]
    .filter((name) => used.has(name));
  return [counts(phase, backends), misses(phase, backends[0]), copies(phase)];
}

/** Table of the number of steps of each op on each backend. */
function counts(phase, backends) {
  const { rows } = phase;
  const cell = (group, name) => {
    const count = group.rows.filter((row) => texts[rows.backend[row]] === name).length;
    return count ? fixed(count) : h("span", { class: "zero" }, "\u00b7");
  };
  const line = (group) => tr(group.key,
    [...backends.map((name) => cell(group, name)), phase.each(group.ns)]);
  const groups = grouped(phase, (_, row) => phase.text("op", row)).sort(longestFirst);
  const [all] = grouped(phase, () => "all");
  return listing("placed", ["steps", ...backends, `${phase.unit}/token`],
    groups.slice(0, LINES).map(line), line(all));
}

/** A list of groups under a heading: description and time of each. */
function list(title, groups, what, rest) {
  const entry = (group) => h("li", {}, what(group), h("small", {}, rest(group)));
  return [h("h3", {}, title), h("ul", { class: "list" }, groups.slice(0, LINES).map(entry))];
}

function misses(phase, first) {
  const key = (_, row) => `${phase.text("backend", row)}\n${phase.text("why", row)}`;
  const missed = grouped(phase, key, (row) => phase.text("why", row)).sort(longestFirst);
  if (!missed.length) return p("note", `Every step runs on ${first}, the first backend.`);
  const ops = (group) => {
    const own = new Map();
    for (const row of group.rows) {
      const op = phase.text("op", row);
      own.set(op, (own.get(op) || 0) + 1);
    }
    return [...own].map(([op, count]) => (count > 1 ? `${op} \u00d7 ${count}` : op)).join(", ");
  };
  return list("not on the first backend", missed, (group) => {
    const [backend, why] = group.key.split("\n");
    return [h("b", {}, `on ${backend}`), ` ${why}`];
  }, (group) => `${ops(group)}: ${phase.perToken(group.ns)}`);
}

function copies(phase) {
  const key = (_, row) => ["backend", "shape", "scope"].map((c) => phase.text(c, row)).join("\n");
  const copied = grouped(phase, key, (row) => phase.rows.copy[row]).sort(longestFirst);
  if (!copied.length) return p("note", "No copies between memories.");
  return list("copies between memories", copied, (group) => {
    const [backend, shape, scope] = group.key.split("\n");
    return [h("b", {}, `to ${backend}`), ` ${shape} `, h("code", {}, scope)];
  }, (group) => `${plural(group.rows.length, "step")}, ${bytes(group.bytes / group.calls)} each, ` +
    phase.perToken(group.ns));
}
