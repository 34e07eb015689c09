// ------------------------------------------------------------------------------------------- arena

/** The arena of one memory as a drawing: steps from left to right, offsets from below. */
class Arena {
  constructor(arena) {
    const { spans } = arena;
    this.arena = arena;
    this.plot = 200;
    this.height = this.plot + AXIS;
    this.length = Math.max(1, ...[0].concat(spans.last.length ? [spans.last.reduce((a, b) => Math.max(a, b)) + 1] : []));
    const y = (offset) => this.plot * (1 - offset / (arena.nbytes || 1));
    this.items = spans.offset.map((offset, i) => ({
      i, lo: spans.first[i], hi: spans.last[i] + 1, top: y(offset + spans.nbytes[i]), bottom: y(offset),
    }));
    this.items.sort((a, b) => a.lo - b.lo || b.bottom - a.bottom);
  }

  draw(context, view, width, palette) {
    const px = (x) => ((x - view.lo) / (view.hi - view.lo)) * width;
    const { spans } = this.arena;
    context.font = `11px ${palette.font}`;
    context.fillStyle = palette.lane;
    context.fillRect(0, 0, width, this.plot);
    const inset = width / (view.hi - view.lo) > 4 ? 1 : 0;
    for (const item of this.items) {
      const from = px(item.lo), to = px(item.hi);
      if (to < 0 || from > width) continue;
      context.fillStyle = palette.ops[hue(texts[spans.op[item.i]])];
      const tall = item.bottom - item.top;
      context.fillRect(from, item.top, Math.max(0.7, to - from - inset),
        Math.max(0.7, tall - (tall > 3 ? 1 : 0)));
    }
    ruler(context, view, width, this.plot, palette, (x) => (Number.isInteger(x) ? fixed(x, 0) : ""));
  }

  at(x, y) {
    return this.items.find((item) => item.lo <= x && x < item.hi && item.top <= y && y < item.bottom)
      || null;
  }

  beside(item, by) {
    return this.items[item ? this.items.indexOf(item) + by : 0] || null;
  }

  tell(item) {
    const { spans } = this.arena, { i } = item;
    return [texts[spans.op[i]], [
      ["scope", texts[spans.scope[i]]], ["size", bytes(spans.nbytes[i])],
      ["at", `${fixed(spans.offset[i], 0)} of ${fixed(this.arena.nbytes, 0)} bytes`],
      ["alive", `steps ${spans.first[i]} to ${spans.last[i]}`],
    ]];
  }
}

/** How full an arena is, in words. */
function fullness(arena) {
  const all = arena.spans.nbytes.reduce((sum, size) => sum + size, 0);
  return `${arena.memory}: ${bytes(arena.nbytes)}, of which ${bytes(arena.peak)} ` +
    `(${percent(arena.nbytes ? arena.peak / arena.nbytes : 1, 0)}) are in use at step ${arena.at}; ` +
    `without places in common it would be ${bytes(all)}.`;
}
