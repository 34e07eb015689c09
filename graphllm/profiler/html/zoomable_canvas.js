// --------------------------------------------------------------------------------- zoomable canvas

/**
 * A canvas over a range of x, zoomed and scrolled with pointer and keys. `drawing` has
 *   length            upper end of x; the lower end is 0
 *   height            in pixels
 *   draw(context, view, width, palette)
 *   at(x, y, view)    the item at a point, or null; `lo` and `hi` are its ends in x
 *   neighbour(item, by)  the item before or after, or the first if item is null
 *   describe(item)       [title, lines] for the tooltip
 */
class ZoomableCanvas {
  constructor(name, drawing) {
    Object.assign(this, { drawing, view: { lo: 0, hi: drawing.length }, item: null });
    this.canvas = h("canvas", {
      tabindex: 0, role: "img",
      "aria-label": `${name}; arrow keys select items, + and - zoom, 0 shows all`,
      onpointermove: (event) => this.move(event),
      onpointerleave: (event) => event.pointerType === "touch" || this.leave(),
      onpointerdown: (event) => this.press(event), onpointerup: () => { this.held = null; },
      onwheel: (event) => this.wheel(event), onkeydown: (event) => this.key(event),
      ondblclick: (event) => this.zoom(0.4, this.x(event)), onblur: () => this.leave(),
    });
    const button = (text, title, act) =>
      h("button", { title, "aria-label": `${name}: ${title}`, onclick: act }, text);
    this.buttons = h("div", { class: "zoom" },
      button("\u2212", "zoom out", () => this.zoom(2.5)),
      button("+", "zoom in", () => this.zoom(0.4)),
      button("all", "show all", () => this.zoom(Infinity)));
  }

  redraw() {
    const { canvas, drawing } = this;
    const width = canvas.parentElement ? canvas.parentElement.clientWidth : 0;
    if (!width) return;
    const scale = devicePixelRatio || 1;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(drawing.height * scale);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${drawing.height}px`;
    this.width = width;
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    const palette = colours();
    context.font = palette.font;
    drawing.draw(context, this.view, width, palette);
    if (!this.item) return;
    const px = (x) => ((x - this.view.lo) / (this.view.hi - this.view.lo)) * width;
    const { lo, hi, top, bottom } = this.item;
    context.strokeStyle = palette.ink;
    context.lineWidth = 1.5;
    context.strokeRect(px(lo), top, Math.max(1, px(hi) - px(lo)), bottom - top);
  }

  x(event) {
    const box = this.canvas.getBoundingClientRect();
    return this.view.lo + ((event.clientX - box.left) / box.width) * (this.view.hi - this.view.lo);
  }

  /** Show `factor` times the range, keeping `middle` in place. */
  zoom(factor, middle) {
    const { lo, hi } = this.view, { length } = this.drawing;
    const kept = middle ?? (this.item ? (this.item.lo + this.item.hi) / 2 : (lo + hi) / 2);
    const size = Math.min(length, Math.max(length / 1e5, (hi - lo) * factor));
    const share = (kept - lo) / (hi - lo);
    this.shift(kept - Math.min(1, Math.max(0, share)) * size, size);
  }

  shift(lo, size = this.view.hi - this.view.lo) {
    const from = Math.max(0, Math.min(lo, this.drawing.length - size));
    this.view = { lo: from, hi: from + size };
    this.redraw();
  }

  press(event) {
    this.held = { x: event.clientX, lo: this.view.lo };
    this.canvas.setPointerCapture(event.pointerId);
    if (event.pointerType === "touch") this.point(event);
  }

  move(event) {
    if (this.held && event.buttons) {
      const size = this.view.hi - this.view.lo;
      tip.hide();
      this.shift(this.held.lo - ((event.clientX - this.held.x) / this.width) * size);
      return;
    }
    this.point(event);
  }

  /** Shows what is under the pointer. */
  point(event) {
    const box = this.canvas.getBoundingClientRect();
    this.show(this.drawing.at(this.x(event), event.clientY - box.top, this.view),
      event.clientX, event.clientY);
  }

  show(item, x, y) {
    this.item = item;
    this.redraw();
    if (item) tip.show(...this.drawing.describe(item), x, y);
    else tip.hide();
  }

  leave() {
    this.held = null;
    this.show(null);
  }

  /** Zoom with Ctrl (also sent for pinching), scroll sideways; otherwise the page scrolls. */
  wheel(event) {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      this.zoom(Math.exp(event.deltaY / 200), this.x(event));
    } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      const size = this.view.hi - this.view.lo;
      this.shift(this.view.lo + (event.deltaX / this.width) * size);
    }
  }

  key(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const factor = { "+": 0.4, "=": 0.4, "-": 2.5, 0: Infinity }[event.key];
    if (by === undefined && factor === undefined) return;
    event.preventDefault();
    if (factor) {
      this.zoom(factor);
      return;
    }
    const item = this.drawing.neighbour(this.item, by);
    if (!item) return;
    const { lo, hi } = this.view, size = hi - lo;
    if (item.lo < lo || item.hi > hi) this.shift((item.lo + item.hi - size) / 2);
    const box = this.canvas.getBoundingClientRect();
    const share = (Math.min(item.hi, this.view.hi) - this.view.lo) / (this.view.hi - this.view.lo);
    this.show(item, box.left + share * box.width, box.top + item.bottom);
  }
}
