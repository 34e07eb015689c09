// ------------------------------------------------------------------------------------------- table

const MANY = 200, MORE = 500; // rows at first, and per click on "more"

/** State of the table, kept when the phase changes. */
const tableState = { by: "op", sort: "time", down: true, filter: "" };

/**
 * Columns with the value of a group (null: none) and its format. `words`: text instead of a
 * number; `bar`: also drawn as a bar.
 */
function columns(phase) {
  const each = (ns) => phase.each(ns), unit = `${phase.unit}/token`;
  const share = (value) => fixed(100 * value, 1);
  const rate = (value) => fixed(value, 1);
  const whole = (value) => fixed(value);
  const own = (id, head, unit, value, text, more) => ({ id, head, unit, value, text, ...more });
  const all = [
    own("key", tableState.by, "", (group) => group.key, String, { words: true }),
    own("calls", "calls", "per pass", (group) => group.calls / phase.passes.length, whole),
    own("time", "time", unit, (group) => group.ns, each),
    own("share", "share", "% of wall", (group) => group.ns / phase.wall, share, { bar: true }),
    own("gbs", "memory", "GB/s", (group) => group.gbs, rate),
    own("gflops", "arithmetic", "GFLOP/s", (group) => group.gflops, rate),
    own("limit", "of roofline", "%", (group) => group.share, share, { bar: true }),
    own("bound", "bound by", "", (group) => group.bound, String, { words: true }),
    own("headroom", "headroom", unit, (group) => group.headroom, each),
    own("overlap", "overlap", unit, (group) => group.overlap || null, each),
  ];
  const overlaps = phase.rows.overlap.some(Boolean);
  return all.filter((column) => column.id !== "overlap" || overlaps);
}

/** The label of a group. */
function label(phase, group) {
  if (tableState.by === "layer" && group.key !== NONE) return `layer ${group.key}`;
  return tableState.by === "step" ? `${phase.step(group.key)} ${phase.kind(group.key)}` : group.key;
}

function compare(column) {
  const turn = tableState.down ? -1 : 1;
  return (a, b) => {
    const one = column.value(a), other = column.value(b);
    if (one === null || other === null) return (one === null) - (other === null);
    if (typeof one === "number" && typeof other === "number") return turn * (one - other);
    return turn * String(one).localeCompare(String(other), "en", { numeric: true });
  };
}

/** The controls, and the table below them. */
function table(phase) {
  const count = h("output", { class: "count" }), holder = h("div", { class: "wide whole" });
  let limit = MANY;
  const draw = () => {
    const words = tableState.filter.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = (row) => words.every((word) => phase.searchText(row).includes(word));
    const groups = grouped(phase, KEYS[tableState.by], words.length ? wanted : undefined);
    const all = columns(phase);
    groups.sort(compare(all.find((column) => column.id === tableState.sort) || all[0]));
    const steps = groups.reduce((sum, group) => sum + group.rows.length, 0);
    count.textContent = plural(steps, "step") + (words.length ? " found" : "");
    holder.replaceChildren(h("table", { class: "profile" },
      h("thead", {}, h("tr", {}, all.map((column) => head(column, sort)))),
      h("tbody", {}, groups.slice(0, limit).map((group) => line(phase, all, group))),
      h("tfoot", {}, sums(phase, all, groups, !words.length))));
    const left = groups.length - limit;
    const more = () => set({}, limit + MORE);
    if (left > 0) {
      holder.append(h("button", { class: "more", onclick: more },
        `${fixed(Math.min(MORE, left))} more of ${fixed(left)}`));
    }
  };
  const set = (changes, most = MANY) => {
    Object.assign(tableState, changes);
    limit = most;
    draw();
  };
  const sort = (id, down) => {
    set({ sort: id, down }, limit);
    holder.querySelector(`th[data-column="${id}"] button`).focus();
  };
  draw();
  const search = h("input", {
    type: "search", id: "filter", value: tableState.filter,
    placeholder: "op, scope, kernel, \u2026",
    oninput: () => set({ filter: search.value }),
  });
  const options = Object.keys(KEYS).map((name) => [name, name]);
  return [
    h("div", { class: "controls" },
      choice("by", "by", options, tableState.by, (by) => set({ by })),
      h("label", { class: "filter" }, "filter ", search), count),
    holder,
  ];
}

/** Column header; a click sorts by it, numbers in descending and words in ascending order. */
function head({ id, head: name, unit, words }, sort) {
  const own = id === tableState.sort;
  const order = own ? (tableState.down ? "descending" : "ascending") : "none";
  const down = own ? !tableState.down : !words;
  return h("th", {
    scope: "col", "data-column": id, "aria-sort": order, class: words && "words",
  }, h("button", { onclick: () => sort(id, down) }, h("span", {}, name), h("small", {}, unit)));
}

/** The cells of a group after the first. */
function cells(all, group) {
  return all.slice(1).map(({ value: of, text, words, bar }) => {
    const value = of(group), drawn = bar && value !== null;
    return h("td", {
      class: words ? "words" : bar && "bar",
      "--length": drawn ? Math.min(1, Math.max(0, value)) : null,
    }, h("span", {}, value === null ? "" : text(value)));
  });
}

/** The row of a group; a click shows or hides its steps below. */
function line(phase, all, group) {
  const ops = tableState.by === "op" || tableState.by === "step";
  const button = h("button", { class: "key", "aria-expanded": "false" },
    ops ? swatch(fillOf(phase.text("op", group.rows[0]))) : null,
    h("span", {}, label(phase, group)),
    tableState.by === "step" ? h("small", {}, phase.text("scope", group.key)) : null);
  let open = null;
  const turn = () => {
    if (getSelection().toString()) return; // text was selected, not a row clicked
    open?.remove();
    open = open ? null : detail(phase, all.length, group);
    if (open) row.after(open);
    button.setAttribute("aria-expanded", String(Boolean(open)));
  };
  const row = h("tr", { onclick: turn }, h("th", { scope: "row" }, button), cells(all, group));
  return row;
}

/** Footer rows that add up to the wall time; with a filter, the sum of the filtered rows only. */
function sums(phase, all, groups, whole) {
  const sum = new Group("");
  for (const group of groups) {
    for (const name of SUMS) sum[name] += group[name];
  }
  const first = h("tr", {}, h("th", { scope: "row" }, "total"), cells(all, sum));
  const rest = ["gaps", "host", "unattributed", "wall"].map((name) => {
    const ns = phase.closing[name];
    const written = { time: phase.each(ns), share: fixed((100 * ns) / phase.wall, 1) };
    return tr(name, all.slice(1).map(({ id }) => written[id] || ""));
  });
  return whole ? [first, rest] : first;
}

// ----------------------------------------------------------------------------------------- details

const DETAILS = 60; // steps of a group per click on "more"
const DETAIL_HEADS = [
  "step", "scope", "op", "shapes", "kernel", "model file", "runs", "median \u00b5s", "min",
  "max", "GB/s", "% of roofline",
];

/** The steps of a group, the longest first, with origin and spread of their times. */
function detail(phase, span, group) {
  const { sum } = phase.rows, rows = [...group.rows].sort((a, b) => sum[b] - sum[a]);
  const list = h("tbody", {}), more = h("button", { class: "more" });
  const add = (event) => {
    event?.stopPropagation();
    const from = list.children.length;
    list.append(...rows.slice(from, from + DETAILS).map((row) => step(phase, row)));
    more.textContent = `more of ${plural(rows.length, "step")}`;
    more.hidden = list.children.length >= rows.length;
  };
  more.addEventListener("click", add);
  add();
  const heads = DETAIL_HEADS.map((name, i) =>
    h("th", { scope: "col", class: i > 0 && i < 6 && "words" }, name));
  return h("tr", { class: "detail" }, h("td", { colspan: span }, h("div", { class: "wide" },
    h("table", { class: "steps" }, h("thead", {}, h("tr", {}, heads)), list), more)));
}

function step(phase, row) {
  const { calls, median, min, max } = phase.rows, own = new Group(row);
  own.add(phase, row);
  const text = (column) => phase.text(column, row), us = (ns) => fixed(ns / 1e3, ns < 1e6 ? 1 : 0);
  const words = (kind, first, second) =>
    h("td", { class: `words ${kind}` }, first, second ? h("small", {}, second) : null);
  return h("tr", {},
    h("td", {}, phase.step(row)),
    words("code", text("scope") || NONE),
    words("", phase.kind(row), text("parts")),
    words("code", text("shape"), text("inputs") && `of ${text("inputs")}`),
    words("", `${text("backend")}: ${text("kernel")}`, text("why")),
    words("code", text("origin")),
    [
      fixed(calls[row]), us(median[row]), us(min[row]), us(max[row]), fixed(own.gbs, 1),
      own.share === null ? "" : fixed(100 * own.share, 1),
    ].map((number) => h("td", {}, number)));
}
