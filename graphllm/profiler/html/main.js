// -------------------------------------------------------------------------------------------- main

const SECTIONS = [
  ["roofline", "Roofline"], ["heat", "Layers"], ["table", "Table"], ["timeline", "Timeline"],
  ["arena", "Memory"], ["placement", "Placement"],
];

const chosen = { phase: phases[phases.length - 1], heat: "time", plan: 0 };
let redraws = []; // what depends on the width or on the colours

/** A place that is drawn again when its width changes. */
function drawn(draw) {
  const place = h("div", { class: "drawing" });
  redraws.push(() => {
    const width = place.clientWidth;
    if (width) place.replaceChildren(...[draw(width)].flat(Infinity).filter(Boolean));
  });
  return place;
}

function zoomed(name, drawing) {
  const scroller = new Scroller(name, drawing);
  redraws.push(() => scroller.redraw());
  return [h("div", { class: "drawing" }, scroller.canvas), scroller.buttons];
}

const opsOf = (phase, rows) => [...hues.keys(), ...new Set(rows.map((text) => texts[text]))]
  .filter((op, i, all) => all.indexOf(op) === i && rows.some((text) => texts[text] === op));

function rooflineSection(phase) {
  return section("roofline", "Roofline",
    "An op's distance from the line above it is what it leaves unused. Left of a bend memory binds, " +
    "right of it arithmetic. Areas are time.",
    null, drawn((width) => roofline(phase, width)));
}

function heatSection(phase) {
  const limited = phase.rows.limit.some((limit) => limit !== null);
  const place = drawn((width) => heat(phase, width, limited ? chosen.heat : "time"));
  const controls = limited ? choice("heat-by", "colour", [["time", "time"], ["gain", "to gain"]],
    chosen.heat, (by) => { chosen.heat = by; redraw(); }) : null;
  return section("heat", "Heat by layer", "Milliseconds a token of each kind of op in each layer.",
    controls, place);
}

function gainsSection(phase) {
  if (phase.rows.limit.every((limit) => limit === null)) return null;
  return section("gains", "Most to gain", "Time above what the ceiling allows, by kind of op.", null,
    gains(phase));
}

function tableSection(phase) {
  return section("table", "Steps",
    "An op's time is its end less the end of the step before it. Click a row for its steps, a column " +
    "to sort by it.", null, table(phase));
}

function timelineSection(phase) {
  const typical = phase.typical.find((run) => run.plan === chosen.plan) || longestRun(phase);
  const [place, buttons] = zoomed("timeline", timeline(phase, typical));
  const env = Object.entries(typical.env).map(([name, value]) => `${name} = ${value}`).join(", ");
  const several = phase.plans > 1 ? choice("plan", "plan", phase.typical.map((run) =>
    [String(run.plan), `${run.plan} (T = ${run.env.T})`]), String(typical.plan),
    (plan) => { chosen.plan = Number(plan); render(`plan`); }) : null;
  const about = `Run ${typical.index + 1} of ${typical.runs}, the one of median length: ${env}.`;
  return section("timeline", "Timeline of a run", about,
    h("div", { class: "controls" }, several, buttons), place, legend(opsOf(phase, phase.rows.op)));
}

const longestRun = (phase) => phase.typical.reduce((most, run) => {
  const spent = (each) => each.runs * each.times.reduce((sum, ns) => sum + ns, 0);
  return spent(run) > spent(most) ? run : most;
});

function arenaSection(phase) {
  const plan = (phase.typical.find((run) => run.plan === chosen.plan) || longestRun(phase)).plan;
  const own = phase.arena.filter((arena) => arena.plan === plan && arena.spans.offset.length);
  const content = own.map((arena) => {
    const [place, buttons] = zoomed(`arena of ${arena.memory}`, new Arena(arena));
    return [h("div", { class: "title" }, h("p", { class: "about" }, fullness(arena)), buttons), place];
  });
  return section("arena", "Memory", "Where results and workspace lie in the arena, offsets upwards, " +
    "from step to step.", null, content.length ? content : h("p", { class: "note" }, "No arena."));
}

function placementSection(phase) {
  return section("placement", "Placement", "Steps of each op on each backend.", null, placement(phase));
}

function bar() {
  const options = phases.map((phase) => [phase.name, phase.name]);
  return [
    choice("phase", "phase", options, chosen.phase.name, (name) => {
      chosen.phase = phases.find((phase) => phase.name === name);
      chosen.plan = longestRun(chosen.phase).plan;
      render();
    }),
    h("div", { class: "links" }, SECTIONS.map(([id, name]) => h("a", { href: `#${id}` }, name))),
  ];
}

function render(focus) {
  const { phase } = chosen;
  const at = scrollY; // the page is short until the drawings are there
  redraws = [];
  tip.hide();
  document.getElementById("main").replaceChildren(
    h("div", { class: "pair" }, rooflineSection(phase),
      h("div", { class: "column" }, heatSection(phase), gainsSection(phase))),
    tableSection(phase), timelineSection(phase),
    h("div", { class: "pair" }, arenaSection(phase), placementSection(phase)));
  redraw();
  scrollTo({ top: at, behavior: "instant" });
  if (focus) document.querySelector(`#${focus} input:checked`)?.focus();
}

function redraw() {
  for (const each of redraws) each();
}

function begin() {
  const head = document.getElementById("head");
  head.append(h("div", { class: "what" }, heading()));
  if (!phases.length) {
    head.append(h("p", { class: "note" }, "Nothing ran."));
    return;
  }
  paint();
  head.append(h("div", { class: "cards", id: "summary" }, phases.map(card), start()));
  chosen.plan = longestRun(chosen.phase).plan;
  document.getElementById("bar").append(...bar());
  render();
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) redraw();
    width = innerWidth;
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  for (const kind of ["wheel", "touchmove"]) addEventListener(kind, tip.hide, { passive: true });
  addEventListener("keydown", (event) => { if (event.key === "Escape") tip.hide(); });
}

begin();
