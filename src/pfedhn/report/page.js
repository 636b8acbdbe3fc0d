"use strict";
// Draws the charts of a report. Words reach the page as text, never as markup.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const data = JSON.parse(document.getElementById("data").textContent);

  function make(name, attributes, parent, text) {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes || {})) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    if (parent) parent.append(element);
    return element;
  }

  function draw(name, attributes, parent, text) {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  }

  function short(value) {
    const units = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
    for (const [size, unit] of units) if (Math.abs(value) >= size) return +(value / size).toPrecision(3) + unit;
    return String(+value.toPrecision(3));
  }

  function ticks(low, high, count) {
    const rough = (high - low || 1) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((part) => part * power).find((part) => part >= rough);
    const found = [];
    for (let value = Math.ceil(low / step) * step; value <= high + step / 1e6; value += step) found.push(value);
    return found;
  }

  function showTip(tip, text, x, y, width) {
    tip.textContent = text;
    tip.style.display = "block";
    tip.style.left = Math.max(0, Math.min(x + 14, width - tip.offsetWidth - 4)) + "px";
    tip.style.top = Math.max(0, y - tip.offsetHeight - 8) + "px";
  }

  // The scale follows the methods that compete: one that stays far behind may leave it.
  function lowest(ends, all, isUp) {
    if (!isUp || ends.length < 3) return Math.min(...all);
    const sorted = [...ends].sort((a, b) => b - a), middle = sorted[Math.floor((sorted.length - 1) / 2)];
    return Math.max(Math.min(...all), middle - 2 * (sorted[0] - middle) - 5);
  }

  function extremes(lists) {
    let low = Infinity, high = -Infinity;
    for (const list of lists) for (const value of list) { low = Math.min(low, value); high = Math.max(high, value); }
    return [low, high];
  }

  function curves(place, column) {
    const controls = make("div", { class: "controls" }, place);
    const what = make("select", { "aria-label": "what is drawn" }, controls);
    if (column.series.some((s) => s.curves.score)) {
      make("option", { value: "score" }, what, column.isAccuracy ? "test accuracy in %" : "test loss");
    }
    if (column.isAccuracy && column.series.some((s) => s.curves.loss)) {
      make("option", { value: "loss" }, what, "validation loss");
    }
    if (!what.options.length) { controls.remove(); return; }
    const against = make("select", { "aria-label": "against what" }, controls);
    make("option", { value: "steps" }, against, "against communication steps");
    make("option", { value: "bytes" }, against, "against bytes on the wire");
    const label = make("label", {}, controls), whole = make("input", { type: "checkbox" }, label);
    label.append(" whole scale");
    const legend = make("div", { class: "legend" }, place), hidden = new Set();
    const chart = make("div", { class: "chart curves" }, place), tip = make("div", { class: "tip" }, chart);
    column.series.forEach((series, number) => {
      const button = make("button", { type: "button", "aria-pressed": "true" }, legend);
      make("i", {}, button).style.background = series.color;
      button.append(series.label);
      button.addEventListener("click", () => {
        if (!hidden.delete(number)) hidden.add(number);
        button.setAttribute("aria-pressed", String(!hidden.has(number)));
        redraw();
      });
    });
    make("p", { class: "note" }, place, "A line is the mean over seeds, its band goes from the lowest to the highest seed.");
    let svg = null;

    function redraw() {
      if (svg) svg.remove();
      const width = Math.max(chart.clientWidth, 200), height = Math.min(380, Math.max(240, width * 0.5));
      const box = { left: 52, right: width - 12, top: 10, bottom: height - 40 };
      svg = draw("svg", { viewBox: "0 0 " + width + " " + height, height, role: "img", "aria-label": "learning curves" }, chart);
      const isBytes = against.value === "bytes";
      const shown = column.series
        .map((series, number) => ({ series, number, curve: series.curves[what.value] }))
        .filter((part) => part.curve && part.curve.step.length && !hidden.has(part.number))
        .map((part) => ({ ...part, x: part.curve.step.map((step) => (isBytes ? step * (part.series.bytesPerStep || 0) : step)) }));
      if (!shown.length) return;
      const far = extremes(shown.map((part) => part.x))[1] || 1;
      const [least, most] = extremes(shown.flatMap((part) => [part.curve.low, part.curve.high]));
      const isUp = what.value === "score" && column.isAccuracy;
      const ends = shown.map((part) => part.curve.mean[part.curve.mean.length - 1]);
      const low = whole.checked ? (isUp ? 0 : least) : lowest(ends, [least], isUp);
      const high = whole.checked && isUp ? 100 : most + (most - low) * 0.03;
      const right = (x) => box.left + (x / far) * (box.right - box.left);
      const up = (y) => box.bottom - ((y - low) / (high - low || 1)) * (box.bottom - box.top);
      for (const value of ticks(low, high, 7)) {
        draw("line", { class: "axis", x1: box.left, x2: box.right, y1: up(value), y2: up(value) }, svg);
        draw("text", { x: box.left - 6, y: up(value) + 4, "text-anchor": "end" }, svg, short(value));
      }
      for (const value of ticks(0, far, width < 500 ? 3 : 6)) {
        draw("text", { x: right(value), y: box.bottom + 16, "text-anchor": "middle" }, svg, short(value));
      }
      const words = isBytes ? "bytes up and down" : "communication steps (one client taking part once)";
      draw("text", { x: (box.left + box.right) / 2, y: height - 6, "text-anchor": "middle" }, svg, words);
      const name = "clip" + Math.random().toString(36).slice(2);
      const clip = draw("clipPath", { id: name }, draw("defs", {}, svg));
      draw("rect", { x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top }, clip);
      const inside = draw("g", { "clip-path": "url(#" + name + ")" }, svg);
      for (const { series, curve, x } of shown) {
        const point = (value, place) => right(x[place]).toFixed(1) + " " + up(value).toFixed(1);
        const over = curve.high.map(point), under = curve.low.map(point).reverse();
        draw("path", { class: "band", fill: series.color, d: "M" + over.concat(under).join("L") + "Z" }, inside);
        const line = { class: "line", stroke: series.color, d: "M" + curve.mean.map(point).join("L") };
        if (series.dashed) line["stroke-dasharray"] = "6 4";
        draw("path", line, inside);
      }
      const rule = draw("line", { class: "rule", y1: box.top, y2: box.bottom, visibility: "hidden" }, svg);
      svg.addEventListener("pointermove", (event) => {
        const area = svg.getBoundingClientRect(), x = event.clientX - area.left, y = event.clientY - area.top;
        const at = ((x - box.left) / (box.right - box.left)) * far;
        if (at < 0 || at > far) { tip.style.display = "none"; rule.setAttribute("visibility", "hidden"); return; }
        const lines = shown.map((part) => {
          let from = 0, to = part.x.length - 1;
          while (from < to) { const half = (from + to) >> 1; if (part.x[half] < at) from = half + 1; else to = half; }
          return [part.curve.mean[from], part.series.label + "  " + part.curve.mean[from].toFixed(isUp ? 2 : 4)];
        });
        lines.sort((a, b) => (isUp ? b[0] - a[0] : a[0] - b[0]));
        rule.setAttribute("x1", x);
        rule.setAttribute("x2", x);
        rule.setAttribute("visibility", "visible");
        const head = (isBytes ? "bytes " : "step ") + short(Math.round(at));
        showTip(tip, [head, ...lines.map((line) => line[1])].join("\n"), x, y, width);
      });
      svg.addEventListener("pointerleave", () => { tip.style.display = "none"; rule.setAttribute("visibility", "hidden"); });
    }

    for (const control of [what, against, whole]) control.addEventListener("change", redraw);
    return redraw;
  }

  function clients(place, column) {
    const measured = column.series.filter((series) => Object.keys(series.clients).length);
    if (!measured.length) return;
    const seeds = [...new Set(measured.flatMap((series) => Object.keys(series.clients)))].sort((a, b) => a - b);
    const controls = make("div", { class: "controls" }, place);
    make("strong", {}, controls, "Clients");
    const seed = make("select", { "aria-label": "seed" }, controls);
    for (const value of seeds) make("option", { value }, seed, "seed " + value);
    const find = make("input", { type: "search", placeholder: "find a client", "aria-label": "find a client" }, controls);
    const chart = make("div", { class: "chart dots" }, place), tip = make("div", { class: "tip" }, chart);
    const canvas = make("canvas", { role: "img", "aria-label": "test accuracy of every client" }, chart);
    const frame = make("div", { class: "clients" }, place), table = make("table", {}, frame);
    let order = { key: 0, isDown: false }, points = [];

    const named = measured.find((series) => series.names);
    const nameOf = (number) => (named ? named.names[number] : "client " + number);

    function present() {
      return measured.filter((series) => series.clients[seed.value]);
    }

    function rows() {
      const series = present(), examples = series[0].clients[seed.value].examples;
      return examples.map((count, number) => ({
        number, name: nameOf(number), count, scores: series.map((part) => part.clients[seed.value].score[number]),
      }));
    }

    function fill() {
      const series = present(), found = rows();
      const value = (row) => (order.key === "name" ? row.name : order.key === "count" ? row.count : row.scores[order.key]);
      found.sort((a, b) => {
        const one = value(a), other = value(b);
        if (one === null || other === null) return (one === null) - (other === null);
        const less = typeof one === "string" ? one.localeCompare(other, undefined, { numeric: true }) : one - other;
        return order.isDown ? -less : less;
      });
      table.replaceChildren();
      const heading = make("tr", {}, make("thead", {}, table));
      const keys = ["name", "count", ...series.map((_, place) => place)];
      const words = ["client", "test examples", ...series.map((part) => part.label)];
      keys.forEach((key, place) => {
        const cell = make("th", { scope: "col", tabindex: "0" }, heading, words[place]);
        if (key === order.key) cell.setAttribute("aria-sort", order.isDown ? "descending" : "ascending");
        const sort = () => { order = { key, isDown: key === order.key && !order.isDown }; fill(); };
        cell.addEventListener("click", sort);
        cell.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
      });
      const body = make("tbody", {}, table), wanted = find.value.toLowerCase();
      for (const row of found) {
        if (!row.name.toLowerCase().includes(wanted)) continue;
        const line = make("tr", {}, body);
        make("td", {}, line, row.name);
        make("td", {}, line, String(row.count));
        const best = Math.max(...row.scores.filter((score) => score !== null));
        for (const score of row.scores) {
          const cell = make("td", {}, line, score === null ? "" : score.toFixed(1));
          if (score !== null && score === best && row.scores.length > 1) cell.className = "best";
        }
      }
    }

    function redraw() {
      const series = present(), width = Math.max(chart.clientWidth, 200), height = 260, ratio = devicePixelRatio || 1;
      canvas.width = width * ratio;
      canvas.height = height * ratio;
      canvas.style.height = height + "px";
      const pen = canvas.getContext("2d"), css = getComputedStyle(document.documentElement);
      pen.scale(ratio, ratio);
      pen.font = "12px system-ui, sans-serif";
      const box = { left: 52, right: width - 12, top: 10, bottom: height - 34 };
      const scores = series.map((part) => part.clients[seed.value].score);
      const least = extremes(scores.map((list) => list.filter((score) => score !== null)))[0];
      const low = Math.max(0, Math.floor((least - 3) / 10) * 10), up = (y) => box.bottom - ((y - low) / (100 - low || 1)) * (box.bottom - box.top);
      pen.strokeStyle = css.getPropertyValue("--line");
      pen.fillStyle = css.getPropertyValue("--soft");
      pen.textAlign = "right";
      for (const value of ticks(low, 100, 5)) {
        pen.beginPath();
        pen.moveTo(box.left, up(value));
        pen.lineTo(box.right, up(value));
        pen.stroke();
        pen.fillText(short(value), box.left - 6, up(value) + 4);
      }
      points = [];
      const wide = (box.right - box.left) / series.length;
      pen.textAlign = "center";
      series.forEach((part, place) => {
        const middle = box.left + wide * (place + 0.5), list = scores[place];
        pen.fillStyle = css.getPropertyValue("--soft");
        const room = Math.max(3, Math.floor(wide / 7));
        pen.fillText(part.label.length > room ? part.label.slice(0, room - 1) + "\u2026" : part.label, middle, height - 12);
        pen.fillStyle = part.color;
        pen.globalAlpha = Math.max(0.25, Math.min(0.8, 60 / list.length));
        list.forEach((score, number) => {
          if (score === null) return;
          const x = middle + (((number * 0.618034) % 1) - 0.5) * wide * 0.7, y = up(score);
          points.push({ x, y, text: nameOf(number) + "\n" + part.label + "  " + score.toFixed(1) + " %\n" + part.clients[seed.value].examples[number] + " test examples" });
          pen.beginPath();
          pen.arc(x, y, 2.5, 0, 7);
          pen.fill();
        });
        pen.globalAlpha = 1;
      });
    }

    canvas.addEventListener("pointermove", (event) => {
      const area = canvas.getBoundingClientRect(), x = event.clientX - area.left, y = event.clientY - area.top;
      let near = null, least = 144;
      for (const point of points) {
        const far = (point.x - x) ** 2 + (point.y - y) ** 2;
        if (far < least) { near = point; least = far; }
      }
      if (near) showTip(tip, near.text, near.x, near.y, chart.clientWidth);
      else tip.style.display = "none";
    });
    canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; });
    seed.addEventListener("change", () => { fill(); redraw(); });
    find.addEventListener("input", fill);
    fill();
    return redraw;
  }

  function sortable(table) {
    const body = table.tBodies[0], first = [...body.rows];
    [...table.tHead.rows[0].cells].forEach((cell, place) => {
      cell.tabIndex = 0;
      const sort = () => {
        const isDown = cell.getAttribute("aria-sort") === "ascending";
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        cell.setAttribute("aria-sort", isDown ? "descending" : "ascending");
        const key = (row) => row.cells[place].textContent, size = (text) => parseFloat(text.replace(/,/g, ""));
        const sorted = [...first].sort((a, b) => {
          const one = size(key(a)), other = size(key(b));
          if (isNaN(one) || isNaN(other)) return isNaN(one) && isNaN(other) ? key(a).localeCompare(key(b)) : isNaN(one) - isNaN(other);
          return one - other;
        });
        body.append(...(isDown ? sorted.reverse() : sorted));
      };
      cell.addEventListener("click", sort);
      cell.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
    });
  }

  const redraws = [];
  for (const place of document.querySelectorAll(".charts")) {
    const column = data[place.dataset.report][place.dataset.column];
    redraws.push(...[curves(place, column), clients(place, column)].filter(Boolean));
  }
  document.querySelectorAll("table.sortable").forEach(sortable);
  const all = () => redraws.forEach((redraw) => redraw());
  let waiting = 0;
  addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(all); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
  all();
})();
