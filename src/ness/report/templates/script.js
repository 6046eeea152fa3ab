"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const LEFT = 26, TOP = 18;
  const minus = (text) => text.replace("-", "−");

  // Sorting: a button in every head; numbers by data-v, blanks last.
  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0];
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const numeric = head.classList.contains("n");
        const up = head.getAttribute("aria-sort") === (numeric ? "descending" : null);
        for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const key = (row) => row.cells[column].dataset.v;
        const order = (a, b) => (numeric ? a - b : a.localeCompare(b)) * (up ? 1 : -1);
        const rows = [...body.rows];
        rows.sort((a, b) => (key(a) === "") - (key(b) === "") || order(key(a), key(b)));
        body.append(...rows);
      });
    });
  }

  // What is said about a field, for pointer and keyboard alike.
  const matrixOf = (numbers) => {
    const every = numbers.map((number) => data.runs[number][4]);
    return every[0].map((row, t) => row.map((_, i) => every.reduce((sum, one) => sum + one[t][i], 0) / every.length));
  };
  const say = (text, x, y) => {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.width - 8)) + "px";
    tip.style.top = (y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18) + "px";
  };
  const hush = () => { tip.hidden = true; };
  const live = (svg) => {
    const numbers = svg.dataset.runs.split(",").map(Number), unit = Number(svg.dataset.unit);
    const names = data.tasks[data.runs[numbers[0]][3]];
    let matrix = null, at = [0, 0], cursor = null;
    const show = (t, i) => {
      matrix ??= matrixOf(numbers);
      if (!matrix[t] || matrix[t][i] === undefined) return false;
      at = [t, i];
      if (!cursor) {
        cursor = svg.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "rect"));
        cursor.setAttribute("class", "cursor");
        cursor.setAttribute("width", unit - 1);
        cursor.setAttribute("height", unit - 1);
      }
      cursor.setAttribute("x", LEFT + i * unit);
      cursor.setAttribute("y", TOP + t * unit);
      const once = matrix.length === 1, change = once ? 0 : matrix[t][i] - matrix[i][i];
      const since = once ? "all tasks learnt at once" : t === i ? "just learnt" : `${change >= 0 ? "+" : ""}${change.toFixed(2)} points since it was learnt`;
      const box = cursor.getBoundingClientRect();
      say(minus(`${once ? "" : `after task ${t + 1}: `}task ${i + 1}, ${names[i]}: ${matrix[t][i].toFixed(2)} %, ${since}`), box.right - 14, box.bottom - 14);
      return true;
    };
    const leave = () => { hush(); cursor?.remove(); cursor = null; };
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
      const t = Math.floor(((event.clientY - box.top) * scale - TOP) / unit), i = Math.floor(((event.clientX - box.left) * scale - LEFT) / unit);
      if (!show(t, i)) leave();
    });
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("blur", leave);
    svg.addEventListener("focus", () => { if (svg.matches(":focus-visible")) show(...at); });
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (event.key === "Escape") leave();
      if (step && show(at[0] + step[0], at[1] + step[1])) event.preventDefault();
    });
  };
  document.querySelectorAll("svg.heat").forEach(live);
  for (const point of document.querySelectorAll(".point[tabindex]")) {
    point.addEventListener("focus", () => { const box = point.getBoundingClientRect(); say(point.getAttribute("aria-label"), box.left, box.top); });
    point.addEventListener("blur", hush);
  }
  addEventListener("scroll", hush, { passive: true });

  // A single run's map, drawn like the others.
  const shade = (change) => {
    const size = Math.round(Math.abs(change) * 100) / 100, step = data.steps.filter((from) => from < size).length;
    return step === 0 ? "n" : (change > 0 ? "g" : "l") + step;
  };
  const draw = (number) => {
    const [benchmark, label, seed, tasks, matrix] = data.runs[number], count = data.tasks[tasks].length;
    const [unit, digits] = count <= 12 ? [36, 1] : [22, 0], once = matrix.length === 1, size = unit > 30 ? 7 : 5;
    const last = matrix[matrix.length - 1], acc = last.reduce((sum, value) => sum + value, 0) / last.length;
    const bwt = once ? null : last.slice(0, -1).reduce((sum, value, i) => sum + value - matrix[i][i], 0) / (count - 1);
    let out = "", corners = "";
    for (let i = 0; i < count; i++) out += `<text x="${LEFT + (i + .5) * unit}" y="12" class="axis" text-anchor="middle">${i + 1}</text>`;
    matrix.forEach((row, t) => {
      const y = TOP + t * unit;
      out += `<text x="20" y="${y + unit / 2 + 4}" class="axis" text-anchor="end">${once ? count : t + 1}</text>`;
      row.forEach((value, i) => {
        const x = LEFT + i * unit, kind = once || t === i ? "d" : shade(value - matrix[i][i]);
        out += `<rect class="f${kind}" x="${x}" y="${y}" width="${unit - 1}" height="${unit - 1}"/><g class="t${kind}"><text x="${x + unit / 2 - .5}" y="${y + unit / 2 + 3.5}">${value.toFixed(digits)}</text></g>`;
        if (kind[0] === "l") corners += `M${x + unit - 1} ${y + unit - 1}h-${size}l${size}-${size}z`;
        if (kind[0] === "g") corners += `M${x + unit - 1} ${y}h-${size}l${size} ${size}z`;
      });
    });
    const map = document.getElementById("run-map");
    map.innerHTML = `<svg class="heat" viewBox="0 0 ${LEFT + count * unit} ${TOP + matrix.length * unit}" role="img" tabindex="0" data-runs="${number}" data-unit="${unit}" style="max-width:${(LEFT + count * unit) * 1.6}px">${out}<path class="corner" d="${corners}"/></svg>`; // numbers only: no text of a record
    map.firstChild.setAttribute("aria-label", `Accuracy matrix of ${label} on ${benchmark}, seed ${seed}`);
    document.getElementById("run-scores").textContent = minus(`ACC ${acc.toFixed(2)} %` + (bwt === null || !isFinite(bwt) ? "" : `, BWT ${(bwt > 0 ? "+" : "") + bwt.toFixed(2)} %`));
    live(map.firstChild);
  };
  const chooser = document.getElementById("run"), groups = new Map();
  data.runs.forEach(([benchmark, label, seed], number) => {
    if (!groups.has(benchmark)) {
      const group = document.createElement("optgroup");
      group.label = benchmark;
      groups.set(benchmark, chooser.appendChild(group));
    }
    groups.get(benchmark).append(new Option(`${label}, seed ${seed}`, number));
  });
  chooser.addEventListener("change", () => draw(Number(chooser.value)));
  document.getElementById("chooser").hidden = false;
  document.getElementById("no-script").hidden = true;
  draw(0);
})();
