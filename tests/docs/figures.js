/* Computes numbers of the interactive figures from the inputs that test_figures.py writes: node figures.js FOLDER INPUTS > RESULTS. */
"use strict";

const fs = require("node:fs");
const path = require("node:path");

const inputs = JSON.parse(fs.readFileSync(process.argv[3], "utf8"));
const figure = (name) => require(path.resolve(process.argv[2], `${name}.js`));

const compute = {
  marginals({ points, noiseLevel, levels }) {
    const own = figure("marginals"), drawn = own.draws(1, 2000);
    return {
      times: own.TIMES,
      velocities: points.map(([x, t]) => own.velocity(x, t)),
      densities: points.map(([x, t]) => own.density(x, t)),
      steps: [true, false].map((corrected) => own.TIMES.slice(0, -1).map((t, i) => own.step(points[i][0], t, own.TIMES[i + 1], noiseLevel, corrected))),
      wrong: [true, false].map((corrected) => levels.map((level) =>
        own.misplaced(own.histogram(own.follow(drawn, level, corrected).map((each) => each.at(-1))), 0))),
    };
  },

  "one-noise"({ start, noise, masks }) {
    const own = figure("one-noise"), shown = own.draws(30, 240);
    const alone = Array.from({ length: 10 }, (_, i) => own.ends(shown, Array.from({ length: 10 }, (_, j) => i === j)));
    return {
      paths: masks.map((random, k) => own.path(start, noise[k], random)),
      alone: alone.map(({ elsewhere }) => elsewhere),
      reached: own.ends(shown, new Array(10).fill(true)).reached,
    };
  },

  chance({ differences, cases }) {
    const own = figure("chance"), drawn = own.draws(1);
    return {
      quantiles: own.QUANTILES,
      intervals: differences.map((each) => own.interval(each, "t")),
      shares: cases.map(([n, truth, bar]) => own.shares(own.intervals(drawn, n, truth, bar), truth)),
    };
  },

  ratio({ noise, cases, ratios }) {
    const own = figure("ratio");
    return {
      logs: noise.map(([mean, elements, delta, kind]) => own.logRatio(mean, elements, delta, kind)),
      beyond: cases.map((each) => own.beyond(...each)),
      moments: cases.map(([elements, delta, , kind]) => own.moments(elements, delta, kind)),
      surrogates: ratios.map((each) => own.surrogate(...each)),
    };
  },

  gradient({ groups, cases }) {
    const own = figure("gradient"), drawn = own.draws(3, 2000);
    return {
      truth: own.truth(),
      estimates: cases.map(([offset, baseline]) => groups.map((draws) => own.estimate(draws, offset, baseline))),
      quality: cases.map(([offset, baseline, members]) => own.quality(drawn.map((group) => own.estimate(group.slice(0, members), offset, baseline)))),
    };
  },

  budget({ cases }) {
    const own = figure("budget");
    return cases.map(([method, settings]) => {
      const counts = own.evaluations(method, settings);
      return { ...counts, forwards: own.total(own.forwards(counts)) };
    });
  },

  estimates({ step }) {
    const own = figure("estimates"), paths = own.paths(1, 40), list = (x) => [...x], { states } = paths[0];
    const errors = Array.from({ length: 9 }, (_, k) => own.ladder(paths, k).map(({ images }) =>
      Math.sqrt(images.reduce((sum, x, member) => sum + (own.reward(x) - own.reward(paths[member].states.at(-1))) ** 2, 0) / 40)));
    return {
      means: own.IMAGES.map(list), scores: own.SCORES, std: own.STD, width: own.WIDTH,
      states: states.map(list), velocities: paths[0].velocities.map(list), reward: own.reward(states.at(-1)),
      rungs: own.ladder(paths.slice(0, 1), step).map(({ count, cost, images }) => ({ count, cost, image: list(images[0]) })),
      errors,
    };
  },

  cloud({ starts, noise }) {
    const own = figure("cloud"), credit = require(path.resolve(process.argv[2], "../first-look/credit.js")), rules = Object.keys(own.RULES);
    const goal = credit.target(own.DEGREES), tables = credit.exactTables(goal), drawn = Array.from({ length: 300 }, own.source(3));
    const given = own.group(noise, noise.map((z, member) => credit.path(starts[member], z)), goal, tables);
    const along = (steps) => steps.map((step) => step[0] * own.DIRECTION[0] + step[1] * own.DIRECTION[1]);
    const both = (value) => Object.fromEntries(rules.map((rule) => [rule, [true, false].map((published) => value(rule, published))]));
    return {
      degrees: own.DEGREES, direction: own.DIRECTION, recorded: own.RECORDED,
      given: both((rule, published) => own.summed(own.gradients(given, rule, published))),
      drawn: both((rule, published) => drawn.map((group) => along(own.gradients(group, rule, published)))),
    };
  },
};

process.stdout.write(JSON.stringify(Object.fromEntries(Object.entries(inputs).map(([name, given]) => [name, compute[name](given)]))));
