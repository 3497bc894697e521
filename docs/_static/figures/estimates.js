/* Estimates of the final image from the states of a path, by their cost. The data are twelve small images with a little noise, a Gaussian
   mixture in 768 dimensions, so that the velocity is a closed form.
   Numbers: flowrl/flow/mixture.py, flowrl/samplers/kernels.py and flowrl/probes/solved.py; tests/docs/test_figures.py compares them. */
"use strict";

(function (root) {
  const credit = root.flowrlCredit ?? require("../first-look/credit.js");
  const { STEPS, TIMES } = credit, SIZE = 16, DIM = 3 * SIZE * SIZE, SCALE = 0.16, STD = 0.004, WIDTH = 0.01, PATHS = 40;
  const COLOURS = [[0, 0.45, 0.7], [0.84, 0.37, 0]], SHAPES = ["disc", "cross", "triangle"];

  /** How much of a pixel a shape covers, with soft edges. */
  function cover(shape, dx, dy) {
    const outside = { disc: Math.hypot(dx, dy) - 3.6, cross: Math.max(Math.min(Math.abs(dx), Math.abs(dy)) - 1.3, Math.max(Math.abs(dx), Math.abs(dy)) - 4),
      triangle: Math.max(dy - 3, Math.abs(dx) * 0.87 - dy * 0.5 - 2.1) }[shape];
    return Math.min(Math.max(0.5 - outside, 0), 1);
  }

  /** The images as latents: pixels from -SCALE (black) to SCALE (white). */
  const IMAGES = [], SCORES = [];
  for (const shape of SHAPES) {
    for (const colour of COLOURS) {
      for (const column of [4.5, 10.5]) {
        const image = new Float64Array(DIM);
        for (let place = 0; place < SIZE * SIZE; place++) {
          const covered = cover(shape, (place % SIZE) - column, Math.floor(place / SIZE) - 7.5);
          for (let channel = 0; channel < 3; channel++) image[3 * place + channel] = SCALE * (2 * (1 + covered * (colour[channel] - 1)) - 1);
        }
        IMAGES.push(image);
        SCORES.push(((shape === "disc") + (colour === COLOURS[0]) + (column < 8)) / 3);
      }
    }
  }

  /** v(x, t) of the mixture. */
  function velocity(x, t) {
    const keep = 1 - t, variance = keep * keep * STD * STD + t * t;
    const logs = IMAGES.map((image) => {
      let square = 0;
      for (let i = 0; i < DIM; i++) square += (x[i] - keep * image[i]) ** 2;
      return -square / (2 * variance);
    });
    const largest = Math.max(...logs), weights = logs.map((log) => Math.exp(log - largest)), total = weights.reduce((sum, w) => sum + w, 0);
    const factor = (t - keep * STD * STD) / variance, v = new Float64Array(DIM);
    weights.forEach((weight, k) => {
      if (weight < 1e-12 * total) return;
      for (let i = 0; i < DIM; i++) v[i] += (weight / total) * (factor * (x[i] - keep * IMAGES[k][i]) - IMAGES[k][i]);
    });
    return v;
  }

  const moved = (x, v, length) => x.map((value, i) => value - length * v[i]);

  /** The states of a path with random steps but the last one, and their velocities. */
  function path(normal) {
    const states = [Float64Array.from({ length: DIM }, normal)], velocities = [];
    for (let i = 0; i < STEPS; i++) {
      const x = states[i], t = TIMES[i], v = velocity(x, t);
      velocities.push(v);
      const { keep, drift, std } = credit.sdeFactors(t, TIMES[i + 1]);
      states.push(i === STEPS - 1 ? moved(x, v, t) : x.map((value, k) => keep * value - drift * v[k] + std * normal()));
    }
    return { states, velocities };
  }

  /** Steps of the ODE from a state along falling times; its first velocity is known. */
  function solved(x, v, times) {
    for (let k = 0; k + 1 < times.length; k++) x = moved(x, k > 0 ? velocity(x, times[k]) : v, times[k] - times[k + 1]);
    return x;
  }

  /** Times of an estimate before a step: `count` equal substeps, or the rest of the sampler's grid. */
  function grid(step, count) {
    return count === "completion" ? TIMES.slice(step) : Array.from({ length: count + 1 }, (_, k) => TIMES[step] * (1 - k / count));
  }

  /** The share of shape (disc), colour (blue) and place (left) that is right, for an image near one of the twelve; a blur, which is near none, gets 0. */
  function reward(x) {
    return IMAGES.reduce((sum, image, k) => {
      let square = 0;
      for (let i = 0; i < DIM; i++) square += (x[i] - image[i]) ** 2;
      return sum + SCORES[k] * Math.exp(-square / DIM / (2 * WIDTH * WIDTH));
    }, 0);
  }

  const RUNGS = [1, 2, 3, 5, "completion"];

  /** For every rung: the new network evaluations, and the estimates before a step of each path. */
  const ladder = (paths, step) => RUNGS.map((count) => ({
    count, cost: grid(step, count).length - 2,
    images: paths.map(({ states, velocities }) => solved(states[step], velocities[step], grid(step, count))),
  }));

  const paths = (seed, count) => { const normal = credit.normals(seed); return Array.from({ length: count }, () => path(normal)); };

  const api = { IMAGES, SCORES, STD, WIDTH, grid, ladder, paths, reward, velocity };
  if (typeof module !== "undefined") { module.exports = api; return; }

  root.flowrlDraw.figure("estimates", (place) => {
    const { HALO, button, chart, element, onWidth, range, says } = root.flowrlDraw;
    const state = { step: 2, member: 0 };
    let drawn, width = 0;
    const step = range("Estimate before step", { min: 0, max: STEPS - 2, step: 1 }, (value) => { state.step = value; draw(); });
    const note = says(), images = element("div", { class: "fl-images" }), box = element("div", { class: "fl-one" });
    place.append(element("div", { class: "fl-row" }, step.box, button("Another path", () => { state.member = (state.member + 1) % PATHS; draw(); })), note, images, box);

    function picture(x, label, under) {
      const canvas = element("canvas", { width: SIZE, height: SIZE, role: "img", "aria-label": `${label}, ${under}` }), context = canvas.getContext("2d");
      const pixels = context.createImageData(SIZE, SIZE);
      for (let k = 0; k < SIZE * SIZE; k++) {
        for (let channel = 0; channel < 3; channel++) pixels.data[4 * k + channel] = Math.round(255 * Math.min(Math.max((x[3 * k + channel] / SCALE + 1) / 2, 0), 1));
        pixels.data[4 * k + 3] = 255;
      }
      context.putImageData(pixels, 0, 0);
      return element("figure", {}, canvas, element("figcaption", {}, element("b", {}, label), ...under.split("; ").flatMap((line) => [element("br"), line])));
    }

    function draw() {
      drawn ??= paths(1, PATHS);
      step.show(state.step, `${state.step} of ${STEPS}`);
      const own = drawn[state.member], final = own.states[STEPS], rungs = ladder(drawn, state.step), rewards = drawn.map(({ states }) => reward(states[STEPS]));
      const name = (count) => (count === "completion" ? "whole ODE" : count === 1 ? "1 step" : `${count} steps`);
      const cost = (rung) => (rung.cost === 0 ? "free" : `cost ${rung.cost}`);
      images.replaceChildren(picture(own.states[state.step], "state", `t = ${TIMES[state.step].toFixed(1)}`),
        ...rungs.map((rung) => picture(rung.images[state.member], name(rung.count), `${cost(rung)}; R ${reward(rung.images[state.member]).toFixed(2)}`)),
        picture(final, "final image", `R ${rewards[state.member].toFixed(2)}`));
      const errors = rungs.map((rung) => Math.sqrt(rung.images.reduce((sum, x, k) => sum + (reward(x) - rewards[k]) ** 2, 0) / PATHS));
      const made = chart({ width, height: 190, x: [-0.4, 9.4], y: [0, 0.6], title: `Error of the estimated reward, ${PATHS} paths (rms)`, yTicks: [0, 0.2, 0.4, 0.6],
        xTicks: [0, 2, 4, 6, 8], xTitle: "new network evaluations; at a point: its steps" });
      const points = rungs.map((rung, k) => [rung.cost, errors[k]]);
      made.line([...points].sort((a, b) => a[0] - b[0]), "stroke: var(--fl-line)", 1.5);
      points.forEach((point, k) => {
        const whole = rungs[k].count === "completion";
        made.dots([point], 11, `stroke: var(--fl-${whole ? "tp" : rungs[k].count === 5 ? "stepwise" : "flow-grpo"})`);
        made.text(...point, whole ? "ODE" : String(rungs[k].count), { dy: whole ? 22 : -10, "text-anchor": "middle", style: HALO });
      });
      box.replaceChildren(made.svg);
      note.textContent = `Before step ${state.step}, the one-step estimate is the mean of the images that are still possible; more steps of the ODE choose one of them. `
        + "R is the share of disc, blue and left that is right, and 0 for a blur.";
    }

    onWidth(box, (now) => { width = now; draw(); });
  });
})(typeof window === "undefined" ? globalThis : window);
