/* The 2-D world and the credit rules of flowrl in plain JavaScript, as pure functions. Every formula of the page is in this file;
   tests/docs/test_first_look.py compares the results with the library's.

   A point is [x, y]. A table of values is [member][column], with one column per decision and a last one for the final reward.
   A table of advantages is [member][decision]. */
"use strict";

(function (root) {
  // The world: eight Gaussians on a ring, and a reward that is high near a target (flowrl/worlds/mixture.py)

  const MODES = 8, RADIUS = 2, STD = 0.25, REWARD_WIDTH = 1;
  const STEPS = 10, NOISE_LEVEL = 0.7;
  const MEANS = Array.from({ length: MODES }, (_, k) => {
    const angle = (2 * Math.PI * k) / MODES;
    return [RADIUS * Math.cos(angle), RADIUS * Math.sin(angle)];
  });

  /** Times 1, ..., 0 of the states of a path. */
  const TIMES = Array.from({ length: STEPS + 1 }, (_, i) => 1 - i / STEPS);

  /** All steps but the last are drawn at random: these are the decisions. */
  const DECISIONS = STEPS - 1;

  /** v(x, t) = E[noise - data | x_t = x] of the mixture, in closed form. */
  function velocity(x, t) {
    const keep = 1 - t, variance = keep * keep * STD * STD + t * t;
    const gaps = MEANS.map((mean) => [x[0] - keep * mean[0], x[1] - keep * mean[1]]);
    const logs = gaps.map((gap) => -(gap[0] * gap[0] + gap[1] * gap[1]) / (2 * variance));
    const largest = Math.max(...logs), weights = logs.map((log) => Math.exp(log - largest));
    const total = weights.reduce((sum, weight) => sum + weight, 0);
    const factor = (t - keep * STD * STD) / variance, v = [0, 0];
    for (let mode = 0; mode < MODES; mode++) {
      for (const axis of [0, 1]) v[axis] += (weights[mode] / total) * (factor * gaps[mode][axis] - MEANS[mode][axis]);
    }
    return v;
  }

  /** Euler's step of the ODE from time t to time s. */
  function odeStep(x, t, s) {
    const v = velocity(x, t);
    return [x[0] - (t - s) * v[0], x[1] - (t - s) * v[1]];
  }

  /** Flow-GRPO's random step from time t to time s has the mean keep x - drift v, and this standard deviation. */
  function sdeFactors(t, s, noiseLevel = NOISE_LEVEL) {
    const delta = t - s, sigma = noiseLevel * Math.sqrt(t / (1 - (t > 1 - 1e-6 ? s : t)));
    const half = (sigma * sigma) / (2 * t);
    return { keep: 1 - half * delta, drift: (1 + half * (1 - t)) * delta, std: sigma * Math.sqrt(delta) };
  }

  /** Mean and standard deviation of Flow-GRPO's random step, from time t to time s. */
  function sdeStep(x, t, s) {
    const v = velocity(x, t), { keep, drift, std } = sdeFactors(t, s);
    return { mean: [keep * x[0] - drift * v[0], keep * x[1] - drift * v[1]], std };
  }

  /** The states of a path: random steps with the given noise [decision], then one step of the ODE. */
  function path(start, noise) {
    const states = [start];
    noise.forEach((z, step) => {
      const { mean, std } = sdeStep(states[step], TIMES[step], TIMES[step + 1]);
      states.push([mean[0] + std * z[0], mean[1] + std * z[1]]);
    });
    states.push(odeStep(states[STEPS - 1], TIMES[STEPS - 1], TIMES[STEPS]));
    return states;
  }

  /** The end of the ODE from the state before a step. */
  function completion(x, step) {
    for (let i = step; i < STEPS; i++) x = odeStep(x, TIMES[i], TIMES[i + 1]);
    return x;
  }

  /** The point on the ring in a direction. */
  function target(degrees) {
    const angle = (degrees * Math.PI) / 180;
    return [RADIUS * Math.cos(angle), RADIUS * Math.sin(angle)];
  }

  /** exp(-d^2 / 2), with d the distance to the goal. */
  function reward(x, goal) {
    const square = (x[0] - goal[0]) ** 2 + (x[1] - goal[1]) ** 2;
    return Math.exp(-square / (2 * REWARD_WIDTH ** 2));
  }

  /** Values of each path: the reward of the ODE's end before every decision, then the final reward. */
  function completedValues(paths, goal) {
    return paths.map((states) => [
      ...states.slice(0, DECISIONS).map((x, step) => reward(completion(x, step), goal)),
      reward(states[STEPS], goal),
    ]);
  }

  // The exact value: the expected final reward of a state, by dynamic programming on a grid (flowrl/bench/exact.py)

  const POINTS = 57, REACH = 5, SPACING = (2 * REACH) / (POINTS - 1);
  const AXIS = Array.from({ length: POINTS }, (_, i) => -REACH + i * SPACING);

  /** Points of the normal distribution, whose weights sum to 1. */
  const NORMAL = Array.from({ length: 1601 }, (_, k) => ({ z: -8 + k / 100, weight: Math.exp(-((-8 + k / 100) ** 2) / 2) }));
  const total = NORMAL.reduce((sum, { weight }) => sum + weight, 0);
  for (const point of NORMAL) point.weight /= total;

  /** The four grid points that enter the cubic interpolation at a coordinate, and their weights (Keys 1981). */
  function taps(coordinate) {
    const last = POINTS - 1, units = Math.min(Math.max((coordinate + REACH) / SPACING, 0), last);
    const base = Math.min(Math.floor(units), last - 1), f = units - base;
    const weights = [
      f * (f * (1 - f / 2) - 0.5), f * f * (1.5 * f - 2.5) + 1, f * (f * (2 - 1.5 * f) + 0.5), (f * f * (f - 1)) / 2,
    ];
    return { index: [Math.max(base - 1, 0), base, base + 1, Math.min(base + 2, last)], weights };
  }

  /** The interpolant of a table [point][point] at x. */
  function interpolated(table, x) {
    const row = taps(x[0]), column = taps(x[1]);
    let sum = 0;
    for (let i = 0; i < 4; i++) {
      for (let j = 0; j < 4; j++) sum += row.weights[i] * column.weights[j] * table[row.index[i]][column.index[j]];
    }
    return sum;
  }

  /** E table(x + std z) at every grid point, z standard normal: axis by axis, exact for the interpolant. */
  function smoothed(table, std) {
    const matrix = AXIS.map((place) => {
      const row = new Float64Array(POINTS);
      for (const { z, weight } of NORMAL) {
        const { index, weights } = taps(place + std * z);
        for (let tap = 0; tap < 4; tap++) row[index[tap]] += weight * weights[tap];
      }
      return row;
    });
    const dot = (a, b) => {
      let sum = 0;
      for (let k = 0; k < POINTS; k++) sum += a[k] * b[k];
      return sum;
    };
    const columns = AXIS.map((_, column) => table.map((row) => row[column]));
    return matrix.map((rowWeights) => {
      const half = columns.map((column) => dot(rowWeights, column));
      return matrix.map((weights) => dot(weights, half));
    });
  }

  /** For every decision, a table over the grid: the expected final reward, given the mean of its random step. */
  function exactTables(goal) {
    const onGrid = (value) => AXIS.map((x) => AXIS.map((y) => value([x, y])));
    const tables = [];
    let values = onGrid((x) => reward(odeStep(x, TIMES[STEPS - 1], TIMES[STEPS]), goal));
    for (let step = DECISIONS - 1; step >= 0; step--) {
      const t = TIMES[step], s = TIMES[step + 1];
      tables[step] = smoothed(values, sdeStep([0, 0], t, s).std);
      if (step > 0) values = onGrid((x) => interpolated(tables[step], sdeStep(x, t, s).mean));
    }
    return tables;
  }

  /** Exact values of each path before every decision, then the final reward. */
  function exactValues(paths, goal, tables) {
    return paths.map((states) => [
      ...tables.map((table, step) => interpolated(table, sdeStep(states[step], TIMES[step], TIMES[step + 1]).mean)),
      reward(states[STEPS], goal),
    ]);
  }

  // Credit rules (flowrl/credit)

  /** g_k = V_{k+1} - V_k. */
  const gains = (values) => values.map((row) => row.slice(1).map((value, k) => value - row[k]));

  /** R - V_k. */
  const longTerm = (values) => values.map((row) => row.slice(0, -1).map((value) => row[row.length - 1] - value));

  /** g_k + lambda g_{k+1} + lambda^2 g_{k+2} + ... */
  function lambdaGains(values, lambda) {
    return gains(values).map((row) => {
      const sums = [...row];
      for (let k = sums.length - 2; k >= 0; k--) sums[k] += lambda * sums[k + 1];
      return sums;
    });
  }

  /** Turning points: decisions with the final trend R - V_0 after one against it. `consistent`: what follows has the sign of the gain. */
  function turningPoints(values, consistent) {
    return gains(values).map((gain, member) => {
      const row = values[member], final = row[row.length - 1], trend = Math.sign(final - row[0]);
      return gain.map((g, k) => {
        const turns = g * trend > 0 && (k === 0 || gain[k - 1] * trend < 0);
        return turns && (!consistent || g * (final - row[k + 1]) > 0);
      });
    });
  }

  /** The turning points that remain when positive and negative ones are reduced to the same number, the largest of each sign.
      Sign and size are those of R - V_k ("aggregate"), or of the trend R - V_0 ("trend"). */
  function balanced(values, turns, by) {
    const size = longTerm(values).map((row) => (by === "trend" ? row.map(() => row[0]) : row));
    const entries = [];  // decision by decision: of equal sizes the later entry remains
    turns[0].forEach((_, k) => turns.forEach((row, member) => {
      if (row[k]) entries.push({ member, k, size: size[member][k] });
    }));
    const up = entries.filter((entry) => entry.size > 0), down = entries.filter((entry) => entry.size < 0);
    const count = Math.min(up.length, down.length);
    if (count === 0) return turns;
    const kept = turns.map((row) => row.map(() => false));
    const largest = (list) => list.sort((a, b) => Math.abs(a.size) - Math.abs(b.size)).slice(-count);
    const zero = entries.filter((entry) => entry.size === 0);
    for (const { member, k } of [...largest(up), ...largest(down), ...zero]) kept[member][k] = true;
    return kept;
  }

  /** (y - mean) / (std + 1e-4), limited to +-5; exactly 0 for equal numbers. */
  function scores(numbers) {
    const gaps = numbers.map((number) => number - numbers[0]);
    const mean = gaps.reduce((sum, gap) => sum + gap, 0) / gaps.length;
    const centred = gaps.map((gap) => gap - mean);
    const std = Math.sqrt(centred.reduce((sum, gap) => sum + gap * gap, 0) / gaps.length);
    return centred.map((gap) => Math.min(Math.max(gap / (std + 1e-4), -5), 5));
  }

  /** `scores` over members and decisions together. */
  function jointScores(table) {
    const flat = scores(table.flat()), count = table[0].length;
    return table.map((_, member) => flat.slice(member * count, (member + 1) * count));
  }

  /** `scores` over members, decision by decision. */
  function stepScores(table) {
    const columns = table[0].map((_, k) => scores(table.map((row) => row[k])));
    return table.map((_, member) => columns.map((column) => column[member]));
  }

  /** The decisions that get their long-term reward: turning points after balancing; `balance` is "aggregate", "trend" or "none". */
  function selectedTurns(values, { consistent = true, balance = "aggregate" } = {}) {
    const turns = turningPoints(values, consistent);
    return balance === "none" ? turns : balanced(values, turns, balance);
  }

  /** Advantages [member][decision] of a rule: "flow-grpo", "gains", "lambda", "tp" or "exact" (the gains of exact values). */
  function advantages(rule, values, options = {}) {
    if (rule === "flow-grpo") {
      const final = scores(values.map((row) => row[row.length - 1]));
      return values.map((row, member) => row.slice(1).map(() => final[member]));
    }
    if (rule === "gains" || rule === "exact") return jointScores(gains(values));
    if (rule === "lambda") return jointScores(lambdaGains(values, options.lambda));
    if (rule !== "tp") throw new Error(`unknown rule ${rule}`);
    const selected = selectedTurns(values, options), whole = longTerm(values);
    return stepScores(gains(values).map((row, member) => row.map((gain, k) => (selected[member][k] ? whole[member][k] : gain))));
  }

  /** Standard normal numbers from a seed (mulberry32, Box-Muller). */
  function normals(seed) {
    let state = (seed * 0x9e3779b9) >>> 0;
    const uniform = () => {
      state = (state + 0x6d2b79f5) >>> 0;
      let bits = Math.imul(state ^ (state >>> 15), 1 | state);
      bits = (bits + Math.imul(bits ^ (bits >>> 7), 61 | bits)) ^ bits;
      return ((bits ^ (bits >>> 14)) >>> 0) / 4294967296;
    };
    return () => Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform());
  }

  /** A group of paths from the same start, with noise of their own. */
  function group(seed, members) {
    const normal = normals(seed), start = [normal(), normal()];
    return Array.from({ length: members }, () =>
      path(start, Array.from({ length: DECISIONS }, () => [normal(), normal()])));
  }

  /** What the page shows first; its text describes member 2 (index 1) of this group. */
  const FIRST = { seed: 138, members: 8, member: 1, degrees: 45, lambda: 0.8 };

  const api = {
    DECISIONS, FIRST, MEANS, STD, STEPS, TIMES, advantages, balanced, completedValues, completion, exactTables, exactValues, gains, group,
    lambdaGains, longTerm, normals, odeStep, path, reward, sdeFactors, sdeStep, selectedTurns, stepScores, target, turningPoints, velocity,
  };
  if (typeof module !== "undefined") module.exports = api;
  else root.flowrlCredit = api;
})(typeof globalThis === "undefined" ? this : globalThis);
