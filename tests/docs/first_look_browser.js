/* Uses the page in the frame as a reader would, and writes what it shows as JSON; see test_first_look.py. */
"use strict";

const frame = document.getElementById("page");
const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

async function until(condition, ms = 5000) {
  for (let waited = 0; waited < ms && !condition(); waited += 50) await wait(50);
  return condition();
}

async function read() {
  const page = frame.contentDocument, view = frame.contentWindow;
  const all = (selector) => [...page.querySelectorAll(selector)];
  await until(() => all("#fl-paths .fl-step").length > 0);
  const seen = () => all("#fl-paths .fl-step").filter((line) => line.getAttribute("visibility") === "visible").length;
  const result = { moved: await until(() => seen() > 0, 20000) };
  result.overflow = page.documentElement.scrollWidth - view.innerWidth;
  const sizes = all(".fl-choices span, button, select, input[type=range]").map((each) => each.getBoundingClientRect());
  result.smallest = Math.min(...sizes.filter((box) => box.width > 0).flatMap((box) => [box.width, box.height]).map((size) => Math.round(size)));

  // addresses with another rule
  result.colours = {};
  for (const rule of ["flow-grpo", "gains", "lambda", "tp", "exact"]) {
    view.location.hash = `rule=${rule}&member=2`;
    await until(() => page.querySelector(`[name=fl-rule][value=${rule}]`).checked);
    result.colours[rule] = all("#fl-paths .fl-plane [data-member='2'] .fl-step").map((line) => line.style.stroke);
  }
  result.labels = all("[name=fl-member]").length;
  result.labelled = [];
  for (const member of all("[name=fl-member]")) {
    member.click();
    result.labelled.push(page.querySelector("#fl-paths .fl-wide svg").getAttribute("aria-label"));
  }

  // the bent curve: keys, then the pointer
  const advantages = () => all(".fl-advantages").map((row) =>
    [...row.querySelectorAll("td")].map((cell) => Number(cell.textContent.replace("−", "-").replace(/[^-+.\d]/g, ""))));
  const point = (name) => page.querySelector(`[data-point="${name}"]`);
  const value = (name) => Number(point(name).getAttribute("aria-valuenow"));
  result.example = advantages();
  point("0,4").focus();
  point("0,4").dispatchEvent(new view.KeyboardEvent("keydown", { key: "ArrowUp", bubbles: true }));
  result.key = value("0,4");
  result.leaked = 0;  // keys that the site would take for its own
  page.addEventListener("keydown", () => { result.leaked += 1; });
  for (const key of ["ArrowLeft", "ArrowRight"]) {
    page.activeElement.dispatchEvent(new view.KeyboardEvent("keydown", { key, bubbles: true }));
  }
  result.key_focus = page.activeElement.dataset.point;
  const box = page.querySelector("#fl-curve svg").getBoundingClientRect();
  const pointer = (target, type, clientY) => target.dispatchEvent(
    new view.PointerEvent(type, { clientX: box.left, clientY, pointerId: 1, bubbles: true, cancelable: true }));
  pointer(point("1,2"), "pointerdown", 0);
  pointer(view, "pointermove", box.top + (186 * box.height) / 266);  // 0.2 on the axis from 230 to 12
  pointer(view, "pointerup", 0);
  pointer(view, "pointermove", box.top);  // after the release
  result.dragged = value("1,2");
  result.bent = advantages();
  return result;
}

const write = (result) => { document.getElementById("result").textContent = JSON.stringify(result); };
frame.addEventListener("load", () => read().then(write, (error) => write({ error: String(error.stack) })));
