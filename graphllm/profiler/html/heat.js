// ----------------------------------------------------------------------------------- heat by layer

const HEAT_ROWS = 16; // kinds of ops; the rest shares a row
const HEAT_COLUMNS = 96; // each is one layer or several

/** Sums by kind of op and column of layers. */
class Heat {
  constructor(phase) {
    const { layer } = phase.rows;
    const inside = grouped(phase, KEYS.op, (row) => layer[row] !== null).sort(longestFirst);
    this.layers = 1 + layer.reduce((most, own) => Math.max(most, own ?? -1), -1);
    this.per = Math.ceil(this.layers / HEAT_COLUMNS) || 1;
    this.columns = Math.ceil(this.layers / this.per);
    this.ns = inside.reduce((sum, group) => sum + group.ns, 0);
    this.kinds = inside.map((group) => group.key);
    const lines = inside.map((group) => group.rows);
    if (inside.length > HEAT_ROWS) {
      this.kinds.splice(HEAT_ROWS - 1, Infinity, "other ops");
      lines.push(lines.splice(HEAT_ROWS - 1).flat());
    }
    this.cells = lines.map((rows, line) => {
      const own = Array(this.columns).fill(null);
      for (const row of rows) {
        const column = Math.floor(layer[row] / this.per);
        own[column] ??= new Group(this.kinds[line]);
        own[column].add(phase, row);
      }
      return own;
    });
  }

  /** The name of a column: its layers. */
  name(column) {
    const from = column * this.per, to = Math.min(from + this.per, this.layers) - 1;
    return from === to ? `layer ${from}` : `layers ${from} to ${to}`;
  }
}

/** Heat map of layers (columns) and kinds of ops (rows); `by`: "time" or "headroom". */
function heat(phase, width, by) {
  const found = new Heat(phase);
  if (!found.columns) return p("note", "No step belongs to a layer.");
  const value = (cell) => (cell === null ? 0 : by === "headroom" ? cell.headroom || 0 : cell.ns);
  const most = Math.max(1, ...found.cells.flat().map(value));
  const left = Math.min(150, Math.max(90, width * 0.3)), wide = (width - left) / found.columns;
  const tall = Math.round(Math.min(26, Math.max(17, wide)));
  const size = { left, wide, tall, bottom: tall * found.kinds.length };
  const drawing = svg("svg", {
    viewBox: `0 0 ${width} ${size.bottom + 34}`, width, height: size.bottom + 34, class: "heat",
    tabindex: 0, role: "group", "aria-label": "heat map by layer; arrow keys move between cells",
  }, heatNames(found, size));
  const rects = found.cells.map((cells, line) => cells.map((cell, column) => svg("rect", {
    x: left + column * wide, y: tall * line, width: Math.max(0.5, wide - (wide > 5 ? 1 : 0)),
    height: tall - 1, class: cell ? "cell" : "none",
    "fill-opacity": 0.06 + (0.94 * value(cell)) / most,
  })));
  drawing.append(...rects.flat());
  heatPointer(phase, found, drawing, rects);
  const outside = percent(1 - found.ns / (phase.closing.ops + phase.closing.copies));
  return [
    drawing,
    p("scale", "0 ", h("i", {}), ` ${phase.perToken(most)} `,
      by === "headroom" ? "headroom" : "time"),
    p("about", `${outside} of the time of steps is outside of layers and not shown here.`),
  ];
}

/** Labels: kinds of ops to the left, layers below. */
function heatNames(found, { left, wide, tall, bottom }) {
  const kinds = found.kinds.map((kind, line) =>
    svg("text", { x: left - 8, y: tall * (line + 0.5) + 4, class: "end" },
      clipped(kind, (left - 8) / 6.2)));
  const every = Math.max(1, Math.ceil(26 / wide)), numbers = [];
  for (let column = 0; column < found.columns; column += every) {
    const x = left + (column + 0.5) * wide;
    numbers.push(svg("text", { x, y: bottom + 13, class: "tick middle" },
      String(column * found.per)));
  }
  const place = { x: left + (found.columns * wide) / 2, y: bottom + 29, class: "axis middle" };
  return [kinds, numbers, svg("text", place, "layer")];
}

/** Outline the cell under the pointer or arrow keys, and show its tooltip. */
function heatPointer(phase, found, drawing, rects) {
  const at = { line: 0, column: -1 };
  const go = (line, column) => {
    const rect = rects[line][column], cell = found.cells[line][column];
    const box = rect.getBoundingClientRect();
    rects[at.line][at.column]?.classList.remove("at");
    rect.classList.add("at");
    Object.assign(at, { line, column });
    tip.show(`${found.kinds[line]}, ${found.name(column)}`,
      cell ? facts(phase, cell) : [["", "nothing"]], box.right, box.bottom);
  };
  const leave = () => rects[at.line][at.column]?.classList.remove("at");
  rects.forEach((line, i) => line.forEach((rect, j) => {
    rect.addEventListener("pointerenter", () => go(i, j));
  }));
  drawing.addEventListener("pointerleave", (event) => { leave(); tip.left(event); });
  drawing.addEventListener("blur", () => { leave(); tip.hide(); });
  const moves = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
  drawing.addEventListener("keydown", (event) => {
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    const within = (value, count) => Math.max(0, Math.min(value, count - 1));
    go(within(at.line + move[0], found.kinds.length), within(at.column + move[1], found.columns));
  });
}

// ---------------------------------------------------------------------------------------- headroom

const HEADROOM_ROWS = 6;

/** The kinds of ops with the most time above their ceilings. */
function headroomTable(phase) {
  const groups = grouped(phase, KEYS.op).filter((group) => group.headroom)
    .sort((a, b) => b.headroom - a.headroom);
  const all = groups.reduce((sum, group) => sum + group.headroom, 0);
  const bar = (group) => h("i", {
    class: "track", "--share": `${(100 * group.headroom) / groups[0].headroom}%`,
    "--fill": fillOf(phase.text("op", group.rows[0])),
  });
  const rows = groups.slice(0, HEADROOM_ROWS).map((group) =>
    tr(group.key, [bar(group), phase.each(group.headroom), percent(group.share), group.bound]));
  return listing("headroom", ["op", "", `${phase.unit}/token`, "of roofline", "bound by"], rows,
    tr(`all ${groups.length}`, ["", phase.each(all), "", ""]));
}
