/* Computes the page's numbers from the inputs that test_first_look.py writes: node first_look.js CREDIT_JS INPUTS > RESULTS. */
"use strict";

const fs = require("node:fs");
const path = require("node:path");

const credit = require(path.resolve(process.argv[2]));
const inputs = JSON.parse(fs.readFileSync(process.argv[3], "utf8"));

const tables = (inputs.tables ?? []).map(({ values, options }) => ({
  gains: credit.gains(values),
  longTerm: credit.longTerm(values),
  plain: credit.turningPoints(values, false),
  consistent: credit.turningPoints(values, true),
  selected: credit.selectedTurns(values, options),
  advantages: Object.fromEntries(
    ["flow-grpo", "gains", "lambda", "tp"].map((rule) => [rule, credit.advantages(rule, values, options)])),
}));

const groups = (inputs.groups ?? []).map(({ degrees, start, noise, states }) => {
  const goal = credit.target(degrees), paths = noise.map((draws) => credit.path(start, draws));
  const exact = credit.exactTables(goal);
  return {
    paths,
    velocities: states.map((row) => row.slice(0, -1).map((x, step) => credit.velocity(x, credit.TIMES[step]))),
    means: states.map((row) => row.slice(0, -2).map((x, step) => credit.sdeStep(x, credit.TIMES[step], credit.TIMES[step + 1]).mean)),
    stds: credit.TIMES.slice(0, -2).map((t, step) => credit.sdeStep([0, 0], t, credit.TIMES[step + 1]).std),
    completed: credit.completedValues(states, goal),
    exact: credit.exactValues(states, goal, exact),
    ownCompleted: credit.completedValues(paths, goal),
    ownExact: credit.exactValues(paths, goal, exact),
  };
});

// what the text of the page says of its first group
const { seed, members, member, degrees } = credit.FIRST, goal = credit.target(degrees), paths = credit.group(seed, members);
const values = credit.completedValues(paths, goal), exact = credit.exactValues(paths, goal, credit.exactTables(goal));
const first = {
  values: values[member],
  uniform: credit.advantages("flow-grpo", values)[member],
  gains: credit.advantages("gains", values)[member],
  selected: credit.selectedTurns(values)[member],
  swings: [values, exact].map((table) => credit.gains(table).flat().reduce((sum, gain) => sum + Math.abs(gain), 0)),
};

process.stdout.write(JSON.stringify({ tables, groups, first }));
