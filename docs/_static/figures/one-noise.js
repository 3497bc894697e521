/* One initial noise in the 2-D world, with a choice of the steps that are random.
   Numbers: the steps of ../first-look/credit.js; tests/docs/test_figures.py compares them with flowrl.samplers.Windowed. */
"use strict";

(function (root) {
  const credit = root.flowrlCredit ?? require("../first-look/credit.js");
  const { MEANS, STEPS, TIMES } = credit, PATHS = 240;

  /** The states of a path: steps in `random` draw their noise [step], the others follow the ODE. */
  function path(start, noise, random) {
    const states = [start];
    for (let i = 0; i < STEPS; i++) {
      const x = states[i];
      if (random[i]) {
        const { mean, std } = credit.sdeStep(x, TIMES[i], TIMES[i + 1]);
        states.push([mean[0] + std * noise[i][0], mean[1] + std * noise[i][1]]);
      } else states.push(credit.odeStep(x, TIMES[i], TIMES[i + 1]));
    }
    return states;
  }

  /** The initial noise of a seed, and the noise of its paths [path][step]. */
  function draws(seed, paths) {
    const normal = credit.normals(seed), pair = () => [normal(), normal()];
    return { start: pair(), noise: Array.from({ length: paths }, () => Array.from({ length: STEPS }, pair)) };
  }

  /** The blob nearest to a point. */
  function blob([x, y]) {
    const square = MEANS.map((mean) => (x - mean[0]) ** 2 + (y - mean[1]) ** 2);
    return square.indexOf(Math.min(...square));
  }

  const NONE = new Array(STEPS).fill(false);

  /** The paths, the blob of each end, the share of ends at another blob than the ODE's, and the number of blobs. */
  function ends({ start, noise }, random) {
    const paths = noise.map((own) => path(start, own, random)), blobs = paths.map((states) => blob(states[STEPS]));
    const home = blob(path(start, [], NONE)[STEPS]);
    return { paths, blobs, home, elsewhere: blobs.filter((each) => each !== home).length / blobs.length, reached: new Set(blobs).size };
  }

  const api = { blob, draws, ends, path };
  if (typeof module !== "undefined") { module.exports = api; return; }

  root.flowrlDraw.figure("one-noise", (place) => {
    const { HALO, button, chart, checks, element, onWidth, says } = root.flowrlDraw;
    const only = (...steps) => NONE.map((_, i) => steps.includes(i)), first = (count) => NONE.map((_, i) => i < count);
    const state = { random: only(0), seed: 30 };
    let drawn, alone, width = 0;
    const steps = checks("Random steps", NONE.map((_, i) => i), (random) => { state.random = random; draw(); });
    const choose = (label, random) => button(label, () => { state.random = random; draw(); });
    steps.set.classList.add("fl-ten");
    const note = says(), charts = element("div", { class: "fl-two" });
    place.append(steps.set, element("div", { class: "fl-row" }, choose("None: ODE", NONE), choose("First three", first(3)), choose("Last three", only(7, 8, 9)),
      choose("All but the last", first(9)), choose("All", first(10)), button("New noise", () => { state.seed += 1; compute(); })), note, charts);

    function compute() {
      drawn = draws(state.seed, PATHS);
      alone = NONE.map((_, i) => ends(drawn, only(i)).elsewhere);
      if (width) draw();
    }

    function plane(result, size) {
      const height = Math.min(size, 300), reach = 3.1, across = (reach * size) / height;
      const made = chart({ width: size, height, x: [-across, across], y: [-reach, reach], margins: [2, 2, 2, 2],
        label: `${PATHS} paths from one initial noise; they end at ${result.reached} blobs` });
      const unit = height / (2 * reach);
      for (const [x, y] of MEANS) made.add(element("circle", { cx: made.x(x), cy: made.y(y), r: 2 * credit.STD * unit, style: "fill: var(--fl-mode)" }));
      const colour = (k) => `var(--fl-${result.blobs[k] === result.home ? "up" : "down"})`;
      result.paths.slice(0, 24).forEach((states, k) => made.line(states, `stroke: ${colour(k)}; opacity: 0.4`, 1));
      for (const there of [true, false]) {
        const shown = result.paths.filter((_, k) => (result.blobs[k] === result.home) === there).map((states) => states[STEPS]);
        made.dots(shown, 4.5, `stroke: var(--fl-${there ? "up" : "down"}); opacity: 0.7`);
      }
      made.line(path(drawn.start, [], NONE), "stroke: var(--fl-ink)", 2.5);
      const [x, y] = drawn.start;
      made.add(element("circle", { cx: made.x(x), cy: made.y(y), r: 4.5, style: "fill: var(--fl-back); stroke: var(--fl-ink)", "stroke-width": 2 }));
      made.text(x, y, "start", { dx: 9, dy: 4, style: HALO });
      return made.svg;
    }

    function bars(size) {
      const made = chart({ width: size, height: Math.min(size * 0.75, 290), x: [-0.5, 9.5], y: [0, 1], title: "If one step alone is random", yTicks: [[0, "0%"], [0.5, "50%"], [1, "100%"]],
        xTicks: NONE.map((_, i) => i), xTitle: "the random step; bar: ends at another blob", margins: [26, 4, 36, 42] });
      alone.forEach((share, i) => {
        made.rect(i - 0.38, i + 0.38, 0, Math.max(share, 0.006), `fill: var(--fl-down); opacity: ${state.random[i] ? 1 : 0.35}`);
        made.text(i, share, `${Math.round(100 * share)}`, { dy: -4, "text-anchor": "middle" });
      });
      return made.svg;
    }

    function draw() {
      const result = ends(drawn, state.random), count = state.random.filter(Boolean).length;
      steps.show(state.random);
      charts.replaceChildren(plane(result, width >= 600 ? (width - 16) / 2 : width), bars(width >= 600 ? (width - 16) / 2 : width));
      note.textContent = count === 0 ? "No step is random: one noise has one end, so there is nothing to compare." :
        `${count} random ${count === 1 ? "step" : "steps"}: ${Math.round(100 * result.elsewhere)}% of ${PATHS} paths end at another blob (orange) than the ODE (thick line), `
        + `and ${result.reached} of 8 blobs are reached.`;
    }

    compute();
    onWidth(charts, (now) => { width = now; draw(); });
  });
})(typeof window === "undefined" ? globalThis : window);
