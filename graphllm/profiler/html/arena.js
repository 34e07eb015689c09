// ------------------------------------------------------------------------------------------- arena

const ARENA_HEIGHT = 200;

/** Drawing of one memory's arena: steps from left to right, offsets upwards. */
class Arena {
  constructor(arena, steps) {
    const { offset, nbytes, first, last } = arena.spans;
    const y = (place) => ARENA_HEIGHT * (1 - place / (arena.nbytes || 1));
    this.arena = arena;
    this.height = ARENA_HEIGHT + AXIS;
    this.length = steps;
    this.items = offset.map((from, i) => ({
      i, lo: first[i], hi: last[i] + 1, top: y(from + nbytes[i]), bottom: y(from),
    }));
    this.items.sort((a, b) => a.lo - b.lo || b.bottom - a.bottom);
  }

  draw(context, view, width, palette) {
    const px = (x) => ((x - view.lo) / (view.hi - view.lo)) * width;
    const gap = width / (view.hi - view.lo) > 4 ? 1 : 0;
    const { op } = this.arena.spans;
    context.fillStyle = palette.lane;
    context.fillRect(0, 0, width, ARENA_HEIGHT);
    for (const { i, lo, hi, top, bottom } of this.items) {
      if (hi < view.lo || lo > view.hi) continue;
      const wide = px(hi) - px(lo) - gap, tall = bottom - top;
      context.fillStyle = palette.ops[hue(texts[op[i]])];
      context.fillRect(px(lo), top, Math.max(0.7, wide), Math.max(0.7, tall - (tall > 3 ? 1 : 0)));
    }
    const step = (x) => (Number.isInteger(x) ? fixed(x) : "");
    ruler(context, view, width, ARENA_HEIGHT, palette, step);
  }

  at(x, y) {
    return this.items.find((item) =>
      item.lo <= x && x < item.hi && item.top <= y && y < item.bottom) || null;
  }

  neighbour(item, by) {
    return this.items[item ? this.items.indexOf(item) + by : 0] || null;
  }

  describe({ i }) {
    const { op, scope, offset, nbytes, first, last } = this.arena.spans;
    return [texts[op[i]], [
      ["scope", texts[scope[i]]], ["size", bytes(nbytes[i])],
      ["offset", `${fixed(offset[i])} of ${fixed(this.arena.nbytes)} bytes`],
      ["alive", `steps ${first[i]} to ${last[i]}`],
    ]];
  }
}

/** A sentence on the size and peak use of an arena. */
function arenaSummary({ memory, nbytes, peak, at, spans }) {
  const all = spans.nbytes.reduce((sum, size) => sum + size, 0);
  const share = percent(nbytes ? peak / nbytes : 1, 0);
  return `${memory}: ${bytes(nbytes)}, peak use ${bytes(peak)} (${share}) at step ${at}. ` +
    `Without reuse, the buffers would take ${bytes(all)}.`;
}
