// ------------------------------------------------------------------------------------------- table

const MANY = 200; // rows at a time
const BY = ["op", "scope", "layer", "backend", "format", "step"];

/** What the table remembers while phases change. */
const shown = { by: "op", sort: "ms", down: true, filter: "" };

const number = (decimals) => (value) => (value === null ? "" : fixed(value, decimals));
const share = (value) => (value === null ? "" : fixed(100 * value, 1));

/** Columns: how a group's value is found, and how it is written. `bar`: drawn as well. */
function columns(phase) {
  const ms = (value) => (value === null ? "" : phase.msText(value));
  const all = [
    { id: "key", head: shown.by, unit: "", value: (g) => g.key, text: String, words: true },
    { id: "calls", head: "calls", unit: "", value: (g) => g.calls, text: number(0) },
    { id: "ms", head: "time", unit: "ms/token", value: (g) => g.ns, text: ms },
    { id: "share", head: "share", unit: "% of wall", value: (g) => g.ns / phase.wall, text: share,
      bar: true },
    { id: "gbs", head: "memory", unit: "GB/s", value: (g) => g.gbs, text: number(1) },
    { id: "gflops", head: "arithmetic", unit: "GFLOP/s", value: (g) => g.gflops, text: number(1) },
    { id: "limit", head: "of limit", unit: "%", value: (g) => g.share, text: share, bar: true },
    { id: "bound", head: "bound by", unit: "", value: (g) => g.bound, text: String, words: true },
    { id: "gain", head: "to gain", unit: "ms/token", value: (g) => g.toGain, text: ms },
    { id: "overlap", head: "overlap", unit: "ms/token", value: (g) => g.overlap || null,
      text: ms },
  ];
  const overlaps = phase.rows.overlap.some(Boolean);
  return all.filter((column) => column.id !== "overlap" || overlaps);
}

/** The key of a group, in words. */
function label(phase, group) {
  if (shown.by === "layer" && group.key !== "\u2013") return `layer ${group.key}`;
  if (shown.by !== "step") return String(group.key);
  const row = group.key, plan = phase.plans > 1 ? `${phase.rows.plan[row]}.` : "";
  return `${plan}${phase.rows.step[row]} ${phase.kind(row)}`;
}

function compare(column) {
  const turn = shown.down ? -1 : 1;
  return (a, b) => {
    const one = column.value(a), other = column.value(b);
    if (one === null || other === null) return (one === null) - (other === null);
    if (typeof one === "number" && typeof other === "number") return turn * (one - other);
    return turn * String(one).localeCompare(String(other), "en", { numeric: true });
  };
}

function table(phase) {
  const count = h("output", { class: "count" });
  const holder = h("div", { class: "wide whole" });
  let limit = MANY;
  const draw = () => {
    const words = shown.filter.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = (row) => words.every((word) => phase.words(row).includes(word));
    const groups = grouped(phase, shown.by, words.length ? wanted : undefined);
    const all = columns(phase);
    groups.sort(compare(all.find((column) => column.id === shown.sort) || all[0]));
    count.textContent = words.length
      ? `${plural(groups.reduce((sum, g) => sum + g.rows.length, 0), "step")} found`
      : plural(phase.count, "step");
    holder.replaceChildren(body(phase, all, groups.slice(0, limit), groups, !words.length, again));
    if (groups.length > limit) {
      const rest = groups.length - limit;
      holder.append(h("button", { class: "more", onclick: () => { limit += 500; draw(); } },
        `${fixed(Math.min(500, rest), 0)} more of ${fixed(rest, 0)}`));
    }
  };
  const again = (id, down) => {
    Object.assign(shown, { sort: id, down });
    draw();
    holder.querySelector(`th[data-column="${id}"] button`).focus();
  };
  const chose = (by) => {
    if (by === "step" || shown.by === "step") Object.assign(shown, { sort: "ms", down: true });
    shown.by = by;
    limit = MANY;
    draw();
  };
  draw();
  const controls = h("div", { class: "controls" },
    choice("by", "by", BY.map((name) => [name, name]), shown.by, chose),
    h("label", { class: "filter" }, h("span", {}, "filter"), h("input", {
      type: "search", id: "filter", value: shown.filter, placeholder: "op, scope, kernel, \u2026",
      oninput: (event) => { shown.filter = event.target.value; limit = MANY; draw(); },
    })), count);
  return [controls, holder];
}

function body(phase, all, groups, found, whole, again) {
  const head = all.map((column) => {
    const own = column.id === shown.sort;
    const order = own ? (shown.down ? "descending" : "ascending") : "none";
    const down = own ? !shown.down : !column.words;
    return h("th", {
      scope: "col", "data-column": column.id, "aria-sort": order, class: column.words && "words",
    }, h("button", { onclick: () => again(column.id, down) },
      h("span", {}, column.head), h("small", {}, column.unit)));
  });
  return h("table", { class: "profile" },
    h("thead", {}, h("tr", {}, head)),
    h("tbody", {}, groups.flatMap((group) => line(phase, all, group))),
    h("tfoot", {}, sums(phase, all, found, whole)));
}

function cells(all, group, from = 1) {
  return all.slice(from).map((column) => {
    const value = column.value(group);
    const bar = column.bar && value !== null ? { "--bar-share": Math.min(1, Math.max(0, value)) } : {};
    return h("td", { class: column.words ? "words" : column.bar && "bar", ...bar },
      h("span", {}, column.text(value)));
  });
}

/** A group, and below it its steps once it is opened. */
function line(phase, all, group) {
  const row = h("tr", {});
  const op = phase.text("op", group.rows[0]);
  const colour = shown.by === "op" || shown.by === "step"
    ? h("i", { class: "swatch", "--fill": fillOf(op) }) : null;
  let open = null;
  const button = h("button", { class: "key", "aria-expanded": "false" }, colour,
    h("span", {}, label(phase, group)),
    shown.by === "step" ? h("small", {}, phase.text("scope", group.key)) : null);
  row.addEventListener("click", () => {
    if (getSelection().toString()) return;
    button.setAttribute("aria-expanded", String(!open));
    if (open) open.remove();
    open = open ? null : detail(phase, all.length, group);
    if (open) row.after(open);
  });
  fill(row, {}, [h("th", { scope: "row" }, button), cells(all, group)]);
  return row;
}

/** What adds up to the wall time; of what the filter left, the sum alone. */
function sums(phase, all, groups, whole) {
  const sum = new Group("sum of these");
  for (const group of groups) {
    for (const key of ["calls", "ns", "overlap", "bytes", "flops", "limit", "limited"]) {
      sum[key] += group[key];
    }
  }
  const rest = (name, ns) => {
    const written = { ms: phase.msText(ns), share: fixed((100 * ns) / phase.wall, 1) };
    return h("tr", {}, h("th", { scope: "row" }, name),
      all.slice(1).map((column) => h("td", {}, written[column.id] || "")));
  };
  const rows = [h("tr", {}, h("th", { scope: "row" }, "all of these"), cells(all, sum))];
  if (!whole) return rows;
  const { gaps, host, unattributed } = phase.closing;
  return [...rows, rest("gaps", gaps), rest("host", host), rest("unattributed", unattributed),
    rest("wall", phase.wall)];
}

const STEPS = 60; // of a group, at a time

/** The steps of a group: where they come from, and how their times spread. */
function detail(phase, span, group) {
  const { rows } = phase, sorted = [...group.rows].sort((a, b) => rows.sum[b] - rows.sum[a]);
  const us = (ns) => fixed(ns / 1e3, 1);
  const names = ["step", "scope", "op", "shapes", "kernel", "model file", "calls", "median \u00b5s",
    "least", "most", "GB/s", "% of limit"];
  const list = h("tbody", {});
  const more = h("button", { class: "more" });
  const add = () => {
    const from = list.children.length;
    for (const row of sorted.slice(from, from + STEPS)) {
      const own = new Group(row);
      own.add(phase, row);
      const plan = phase.plans > 1 ? `${rows.plan[row]}.` : "";
      const parts = phase.text("parts", row), why = phase.text("why", row);
      list.append(h("tr", {},
        h("td", {}, `${plan}${rows.step[row]}`),
        h("td", { class: "words code" }, phase.text("scope", row) || "\u2013"),
        h("td", { class: "words" }, phase.kind(row), parts ? h("small", {}, parts) : null),
        h("td", { class: "words code" }, phase.text("shape", row),
          h("small", {}, `of ${phase.text("inputs", row)}`)),
        h("td", { class: "words" }, `${phase.text("backend", row)}: ${phase.text("kernel", row)}`,
          why ? h("small", {}, why) : null),
        h("td", { class: "words code" }, phase.text("origin", row)),
        h("td", {}, fixed(rows.calls[row], 0)), h("td", {}, us(rows.median[row])),
        h("td", {}, us(rows.min[row])), h("td", {}, us(rows.max[row])),
        h("td", {}, fixed(own.gbs, 1)), h("td", {}, share(own.share))));
    }
    more.textContent = `more of ${plural(sorted.length, "step")}`;
    more.hidden = list.children.length >= sorted.length;
  };
  more.addEventListener("click", add);
  add();
  return h("tr", { class: "detail" }, h("td", { colspan: span }, h("div", { class: "wide" },
    h("table", { class: "steps" }, h("thead", {}, h("tr", {}, names.map((name, i) =>
      h("th", { scope: "col", class: i > 0 && i < 6 && "words" }, name)))), list), more)));
}
