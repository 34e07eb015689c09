// -------------------------------------------------------------------------------------------- main

const SECTIONS = [
  ["roofline", "Roofline"], ["heat", "Layers"], ["table", "Table"], ["timeline", "Timeline"],
  ["arena", "Memory"], ["placement", "Placement"],
];

const chosen = { phase: phases[phases.length - 1], heat: "time", plan: 0 };
let redraws = []; // of what depends on the width or on the colours

/** A place that is drawn again when its width changes. */
function drawn(draw) {
  const place = h("div", { class: "drawing" });
  redraws.push(() => {
    const width = place.clientWidth;
    if (width) place.replaceChildren(...[draw(width)].flat(Infinity));
  });
  return place;
}

/** A drawing that can be zoomed, and its buttons. */
function zoomed(name, drawing) {
  const scroller = new Scroller(name, drawing);
  redraws.push(() => scroller.redraw());
  return [h("div", { class: "drawing" }, scroller.canvas), scroller.buttons];
}

/** The typical run that is looked at. */
const typical = () => chosen.phase.typical.find((run) => run.plan === chosen.plan);

/** The plan that took most of a phase. */
function mainPlan(phase) {
  const spent = (run) => run.runs * run.times.reduce((sum, ns) => sum + ns, 0);
  return phase.typical.reduce((most, run) => (spent(run) > spent(most) ? run : most)).plan;
}

function rooflineSection(phase) {
  return section("roofline", "Roofline", "An op's distance from the line above it is what it " +
    "leaves unused. Left of a bend memory binds, right of it arithmetic. Areas are time.", null,
  drawn((width) => roofline(phase, width)));
}

function heatSection(phase) {
  const controls = choice("heat-by", "colour", [["time", "time"], ["gain", "to gain"]], chosen.heat,
    (by) => { chosen.heat = by; redraw(); });
  return section("heat", "Heat by layer", "Time a token of each kind of op in each layer.",
    phase.limited ? controls : null,
    drawn((width) => heat(phase, width, phase.limited ? chosen.heat : "time")));
}

function gainsSection(phase) {
  if (!phase.limited) return null;
  return section("gains", "Most to gain", "Time above what the ceiling allows, by kind of op.",
    null, gains(phase));
}

function tableSection(phase) {
  return section("table", "Steps", "A step's time is its end less the end of the one before it. " +
    "Choose a row for its steps, a column to sort by it.", null, table(phase));
}

function timelineSection(phase) {
  const run = typical(), [place, buttons] = zoomed("timeline", timeline(phase, run));
  const env = Object.entries(run.env).map(([name, value]) => `${name} = ${value}`).join(", ");
  const options = phase.typical.map((each) => [String(each.plan), `plan ${each.plan}`]);
  const plans = choice("plan", "plan", options, String(run.plan), (plan) => {
    chosen.plan = Number(plan);
    render();
    document.querySelector("#plan input:checked").focus();
  });
  return section("timeline", "Timeline of a run",
    `Run ${run.index + 1} of ${run.runs}, the one of median length: ${env}.`,
    h("div", { class: "controls" }, phase.plans > 1 ? plans : null, buttons), place,
    legend(new Set(phase.rows.op.map((text) => texts[text]))));
}

function arenaSection(phase) {
  const own = phase.arena.filter((each) => each.plan === chosen.plan && each.spans.offset.length);
  const content = own.map((each) => {
    const name = `arena of ${each.memory}`;
    const [place, buttons] = zoomed(name, new Arena(each, typical().times.length));
    return [h("div", { class: "title" }, p("about", fullness(each)), buttons), place];
  });
  return section("arena", "Memory", "Where results and workspace lie in the arena, from step to " +
    "step; offsets upwards.", null, content.length ? content : p("note", "No arena."));
}

function placementSection(phase) {
  return section("placement", "Placement", "Steps of each op on each backend.", null,
    placement(phase));
}

/** The phases to choose from, and links to the sections. */
function bar() {
  const chose = (name) => {
    chosen.phase = phases.find((phase) => phase.name === name);
    chosen.plan = mainPlan(chosen.phase);
    render();
  };
  const options = phases.map(({ name }) => [name, name]);
  return [
    choice("phase", "phase", options, chosen.phase.name, chose),
    h("div", { class: "links" }, SECTIONS.map(([id, name]) => h("a", { href: `#${id}` }, name))),
  ];
}

function render() {
  const { phase } = chosen, at = scrollY; // the page is short until the drawings are there
  redraws = [];
  tip.hide();
  document.getElementById("main").replaceChildren(
    h("div", { class: "pair" }, rooflineSection(phase),
      h("div", { class: "column" }, heatSection(phase), gainsSection(phase) ?? [])),
    tableSection(phase), timelineSection(phase),
    h("div", { class: "pair" }, arenaSection(phase), placementSection(phase)));
  redraw();
  scrollTo({ top: at, behavior: "instant" });
}

function redraw() {
  for (const each of redraws) each();
}

function listen() {
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) redraw();
    width = innerWidth;
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  for (const kind of ["wheel", "touchmove"]) addEventListener(kind, tip.hide, { passive: true });
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") tip.hide();
  });
}

function begin() {
  const top = document.getElementById("head");
  top.append(...heading(), busy() ?? "");
  if (!phases.length) {
    top.append(p("note", "Nothing ran."));
    return;
  }
  paint();
  top.append(h("div", { class: "cards", id: "summary" }, phases.map(card), start()));
  document.getElementById("bar").append(...bar());
  chosen.plan = mainPlan(chosen.phase);
  render();
  listen();
}

begin();
