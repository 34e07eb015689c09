// ------------------------------------------------------------------------------------------ labels

const measurer = document.createElement("canvas").getContext("2d");

/** Bounding box of a text whose baseline is centred on (x, y), rotated by an angle. */
function textBox(text, x, y, angle = 0) {
  measurer.font = `11px ${getComputedStyle(document.documentElement).getPropertyValue("--font")}`;
  const size = measurer.measureText(text), { width } = size;
  const up = size.fontBoundingBoxAscent, down = size.fontBoundingBoxDescent;
  const cos = Math.cos(angle), sin = Math.sin(angle), half = width / 2 + 1;
  const corners = [[-half, -up], [half, -up], [-half, down], [half, down]]
    .map(([right, below]) => [x + right * cos - below * sin, y + right * sin + below * cos]);
  const xs = corners.map(([at]) => at), ys = corners.map(([, at]) => at);
  return {
    left: Math.min(...xs), right: Math.max(...xs), top: Math.min(...ys), bottom: Math.max(...ys),
    x, y,
  };
}

const overlap = (a, b) =>
  a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;

/** Whether a line [x1, y1, x2, y2] intersects a rectangle (Liang and Barsky 1984). */
function enters([x1, y1, x2, y2], room) {
  let from = 0, to = 1;
  const right = x2 - x1, below = y2 - y1;
  for (const [step, gap] of [[-right, x1 - room.left], [right, room.right - x1],
    [-below, y1 - room.top], [below, room.bottom - y1]]) {
    if (step === 0 && gap < 0) return false;
    if (step < 0) from = Math.max(from, gap / step);
    if (step > 0) to = Math.min(to, gap / step);
  }
  return from <= to;
}

/** Places the labels of a drawing without overlaps. */
class Labels {
  constructor() {
    this.placed = []; // rectangles of labels
    this.marks = []; // rectangles that labels avoid if possible
    this.lines = []; // lines that labels avoid if possible
  }

  /** Return and occupy the first candidate rectangle that no label overlaps, or null. Candidates
   *  off all marks and lines are preferred; with `strict`, one on a mark is never used. The
   *  `leader` of a rectangle is a line that may cross no label and that later labels avoid. */
  place(spots, strict = false) {
    const apart = (room) => !this.placed.some((other) => overlap(room, other) ||
      (room.leader && enters(room.leader, other)));
    const clear = (room) => !this.marks.some((other) => overlap(room, other));
    const found = spots.filter(apart), off = found.filter(clear);
    const own = off.find((room) => !this.lines.some((line) => enters(line, room))) ??
      off[0] ?? (strict ? null : found[0]);
    if (!own) return null;
    this.placed.push(own);
    if (own.leader) this.lines.push(own.leader);
    return own;
  }
}
