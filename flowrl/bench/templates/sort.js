// A click on a column's head sorts the rows of its table by the number at the start of their cells, else by text; a second click reverses.
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.querySelectorAll("thead th")];
  heads.forEach((head, column) => {
    let direction = 1;
    head.style.cursor = "pointer";
    head.title = "Sort";
    head.addEventListener("click", () => {
      const body = table.tBodies[0];
      const key = (row) => {
        const text = row.cells[column] ? row.cells[column].textContent.trim() : "";
        const number = text.replace("\u2212", "-").match(/^[▲▼=?✓✗]?\s*([+-]?[0-9]*\.?[0-9]+)/);
        return number ? [0, parseFloat(number[1])] : [1, text];
      };
      direction = -direction;
      const rows = [...body.rows].sort((a, b) => {
        const [kind, x] = key(a), [other, y] = key(b);
        return kind !== other ? kind - other : direction * (x < y ? -1 : x > y ? 1 : 0);
      });
      body.append(...rows);
    });
  });
}
