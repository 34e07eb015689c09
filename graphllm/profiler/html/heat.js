// ------------------------------------------------------------------------------------ heat by layer

const HEAT_ROWS = 16; // kinds of op; the others share a row
const HEAT_COLUMNS = 96; // layers, or several in a column

/** Layers from left to right, kinds of op from above: cells with their sums. */
function heatCells(phase) {
  const inside = grouped(phase, "op", (row) => phase.rows.layer[row] !== null)
    .sort((a, b) => b.ns - a.ns);
  const last = phase.rows.layer.reduce((most, layer) => Math.max(most, layer ?? -1), -1);
  const per = Math.ceil((last + 1) / HEAT_COLUMNS) || 1;
  const kinds = inside.length > HEAT_ROWS
    ? [...inside.slice(0, HEAT_ROWS - 1), { key: "other ops", rows: [] }] : inside;
  for (const group of inside.slice(HEAT_ROWS - 1)) {
    if (inside.length > HEAT_ROWS) kinds[HEAT_ROWS - 1].rows.push(...group.rows);
  }
  const cells = kinds.map((kind) => {
    const own = new Map();
    for (const row of kind.rows) {
      const column = Math.floor(phase.rows.layer[row] / per);
      if (!own.has(column)) own.set(column, new Group(kind.key));
      own.get(column).add(phase, row);
    }
    return own;
  });
  const ns = inside.reduce((sum, group) => sum + group.ns, 0);
  return { kinds, cells, per, columns: Math.ceil((last + 1) / per), last, ns };
}

function heat(phase, width, by) {
  const found = heatCells(phase);
  if (!found.columns) return [h("p", { class: "note" }, "No step is inside of a layer.")];
  const value = by === "gain" ? (cell) => cell.toGain || 0 : (cell) => cell.ns;
  const most = Math.max(1, ...found.cells.flatMap((own) => [...own.values()].map(value)));
  const left = Math.min(150, Math.max(90, width * 0.3)), cell = (width - left) / found.columns;
  const tall = Math.round(Math.min(26, Math.max(17, cell)));
  const height = tall * found.kinds.length + 34;
  const drawing = svg("svg", {
    viewBox: `0 0 ${width} ${height}`, width, height, class: "heat", tabindex: 0, role: "group",
    "aria-label": "heat by layer; arrow keys go through the cells", onblur: tip.hide,
  });
  const rects = found.kinds.map((kind, line) => {
    drawing.append(svg("text", { x: left - 8, y: tall * (line + 0.5) + 4, class: "end" },
      clipped(kind.key, (left - 8) / 6.2)));
    return Array.from({ length: found.columns }, (_, column) => {
      const own = found.cells[line].get(column);
      const share = own ? value(own) / most : 0;
      const rect = svg("rect", {
        x: left + column * cell, y: tall * line, width: Math.max(0.5, cell - (cell > 5 ? 1 : 0)),
        height: tall - 1, class: own ? "cell" : "none", "fill-opacity": own ? 0.06 + 0.94 * share : 1,
        onpointerenter: () => point(line, column), onpointerleave: tip.left,
      });
      drawing.append(rect);
      return rect;
    });
  });
  const layers = (column) => {
    const from = column * found.per, to = Math.min(from + found.per - 1, found.last);
    return from === to ? `layer ${from}` : `layers ${from} to ${to}`;
  };
  const at = { line: 0, column: -1 };
  function point(line, column) {
    const own = found.cells[line].get(column), box = rects[line][column].getBoundingClientRect();
    const lines = own ? facts(phase, own) : [["", "nothing"]];
    drawing.querySelector(".at")?.classList.remove("at");
    rects[line][column].classList.add("at");
    Object.assign(at, { line, column });
    tip.show(`${found.kinds[line].key}, ${layers(column)}`, lines, box.right, box.bottom);
  }
  const moves = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
  drawing.addEventListener("keydown", (event) => {
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    point(Math.max(0, Math.min(at.line + move[0], found.kinds.length - 1)),
      Math.max(0, Math.min(at.column + move[1], found.columns - 1)));
  });
  heatScale(drawing, found, { left, cell, tall, width, height });
  return [drawing, scale(by, phase.msText(most)),
    h("p", { class: "about" }, `${percent(1 - found.ns / phase.closing.ops)} of the ops' time is ` +
      "outside of the layers, and not shown here.")];
}

const clipped = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}\u2026` : text);

/** Numbers of the layers below the cells. */
function heatScale(drawing, found, { left, cell, tall }) {
  const every = Math.max(1, Math.ceil(26 / cell));
  for (let column = 0; column < found.columns; column += every) {
    drawing.append(svg("text", {
      x: left + (column + 0.5) * cell, y: tall * found.kinds.length + 13, class: "tick middle",
    }, String(column * found.per)));
  }
  drawing.append(svg("text", {
    x: left + (found.columns * cell) / 2, y: tall * found.kinds.length + 29, class: "axis middle",
  }, "layer"));
}

function scale(by, most) {
  return h("p", { class: "scale" }, "0 ", h("i", {}), ` ${most} ms a token `,
    by === "gain" ? "to gain" : "spent");
}

// ------------------------------------------------------------------------------------ most to gain

const FIRST = 6;

/** The kinds of op with most time above their limits. */
function gains(phase) {
  const groups = grouped(phase, "op").filter((group) => group.toGain)
    .sort((a, b) => b.toGain - a.toGain);
  const all = groups.reduce((sum, group) => sum + group.toGain, 0);
  const most = groups.length ? groups[0].toGain : 1;
  return h("table", { class: "parts gains" },
    h("thead", {}, h("tr", {}, h("th", {}, "op"), h("th", { class: "track" }),
      h("th", {}, "ms/token"), h("th", {}, "of limit"), h("th", { class: "words" }, "bound by"))),
    h("tbody", {}, groups.slice(0, FIRST).map((group) => h("tr", {},
      h("th", { scope: "row" }, group.key),
      h("td", { class: "track" }, h("i", {
        "--share": `${(100 * group.toGain) / most}%`, "--fill": fillOf(phase.text("op", group.rows[0])),
      })),
      h("td", {}, phase.msText(group.toGain)), h("td", {}, percent(group.share)),
      h("td", { class: "words" }, group.bound)))),
    h("tfoot", {}, h("tr", {}, h("th", { scope: "row" }, `all ${groups.length}`), h("td", {}),
      h("td", {}, phase.msText(all)), h("td", {}), h("td", {}))));
}
