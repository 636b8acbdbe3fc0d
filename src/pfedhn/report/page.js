"use strict";
// Draws the charts of a report. Words reach the page as text, never as markup.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const data = JSON.parse(document.getElementById("data").textContent);
  const isDark = matchMedia("(prefers-color-scheme: dark)");
  // Okabe and Ito, which color-blind people can tell apart.
  const HUES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#6a51a3", "#999999", "#b2182b"];
  const SCALE = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];

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

  function choice(parent, words, options) {
    const select = make("select", { "aria-label": words }, parent);
    for (const [value, text] of options) make("option", { value }, select, text);
    return select;
  }

  function short(value) {
    for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (Math.abs(value) >= size) return +(value / size).toPrecision(3) + unit;
    }
    return String(+value.toPrecision(3));
  }

  function ticks(low, high, count) {
    const rough = (high - low || 1) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((part) => part * power).find((part) => part >= rough * 0.999);
    const found = [];
    for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step / 1e6; value += step) found.push(value);
    return found;
  }

  // Of a logarithmic scale: fewer to each power of ten the more of these there are.
  function powers(low, high) {
    const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high)), parts = to - from > 5 ? [1] : to - from > 2 ? [1, 3] : [1, 2, 5];
    const found = Array.from({ length: to - from + 1 }, (_, place) => parts.map((part) => part * 10 ** (from + place))).flat();
    return found.filter((value) => value >= low && value <= high);
  }

  // How many digits losses get after the point, by the largest: none from 1,000 on.
  function digitsOf(values) {
    const largest = extremes([values.map((value) => value && Math.abs(value))])[1];
    return largest > 0 && largest < Infinity ? Math.min(4, Math.max(0, 3 - Math.floor(Math.log10(largest)))) : 3;
  }

  function extremes(lists) {
    let low = Infinity, high = -Infinity;
    for (const list of lists) for (const value of list) {
      if (value === null) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
    return [low, high];
  }

  function ink(name) {
    return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  }

  // Colors of methods are made for white paper; on a dark screen the dark ones are mixed with white.
  const pen = make("canvas").getContext("2d");
  function shade(color) {
    if (!isDark.matches) return color;
    pen.fillStyle = color;
    const parts = [1, 3, 5].map((place) => parseInt(pen.fillStyle.slice(place, place + 2), 16));
    const light = (0.3 * parts[0] + 0.59 * parts[1] + 0.11 * parts[2]) / 255;
    const white = Math.max(0, 0.62 - light);
    return "rgb(" + parts.map((part) => Math.round(part + (255 - part) * white)).join(" ") + ")";
  }

  function onScale(share) {
    const at = Math.max(0, Math.min(1, share)) * (SCALE.length - 1), from = Math.min(Math.floor(at), SCALE.length - 2);
    return "rgb(" + SCALE[from].map((part, place) => Math.round(part + (at - from) * (SCALE[from + 1][place] - part))).join(" ") + ")";
  }

  function hue(number, count) {
    return count <= HUES.length ? shade(HUES[number]) : "hsl(" + ((number * 360) / count) + " 65% " + (number % 2 ? 62 : 45) + "%)";
  }

  // A canvas of the width that there is, sharp on every screen; its pixels are those of the page.
  function sheet(canvas, width, height) {
    const ratio = devicePixelRatio || 1, made = canvas.getContext("2d");
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = width + "px";
    canvas.style.height = height + "px";
    made.setTransform(ratio, 0, 0, ratio, 0, 0);
    made.font = "12px system-ui, sans-serif";
    return made;
  }

  // Words beside the pointer, kept inside the chart.
  function tipOf(chart) {
    const tip = make("div", { class: "tip", role: "status" }, chart);
    return {
      hide() { tip.style.display = "none"; },
      show(text, x, y) {
        tip.textContent = text;
        tip.style.display = "block";
        const width = chart.clientWidth, isRight = x + 16 + tip.offsetWidth <= width;
        tip.style.left = Math.max(0, isRight ? x + 16 : x - tip.offsetWidth - 16) + "px";
        tip.style.top = Math.max(0, y - tip.offsetHeight - 8) + "px";
      },
    };
  }

  function onPointer(element, moved, left) {
    const told = (event) => {
      const area = element.getBoundingClientRect();
      moved(event.clientX - area.left, event.clientY - area.top);
    };
    element.addEventListener("pointermove", told);
    element.addEventListener("pointerdown", told);
    element.addEventListener("pointerleave", left);
  }

  // The scale follows the methods that compete: one that stays far behind may leave it.
  function lowest(ends, least, isUp) {
    if (!isUp || ends.length < 3) return least;
    const sorted = [...ends].sort((a, b) => b - a), middle = sorted[Math.floor((sorted.length - 1) / 2)];
    return Math.max(least, middle - 2 * (sorted[0] - middle) - 5);
  }

  function lossWord(column) {
    return column.isSquared ? "squared error on test examples" : "test loss";
  }

  function curves(place, column) {
    const series = column.series.filter((part) => part.curves.score || part.curves.loss);
    const kinds = [];
    if (series.some((part) => part.curves.score)) kinds.push(["score", column.isAccuracy ? "test accuracy in %" : lossWord(column)]);
    if (column.isAccuracy && series.some((part) => part.curves.loss)) kinds.push(["loss", "validation loss"]);
    if (!kinds.length) return null;
    make("h3", {}, place, "Learning curves");
    const controls = make("div", { class: "controls" }, place), what = choice(controls, "what is drawn", kinds);
    const against = choice(controls, "against what", [
      ["steps", "against communication steps"], ["rounds", "against rounds"], ["bytes", "against bytes sent"],
    ]);
    const tick = (words) => {
      const label = make("label", {}, controls), box = make("input", { type: "checkbox" }, label);
      label.append(" " + words);
      return box;
    };
    const whole = tick("whole scale"), log = tick("logarithmic scale"), hint = make("span", { class: "hint" }, controls);
    const legend = make("div", { class: "legend" }, place), hidden = new Set();
    const chart = make("div", { class: "chart curves" }, place), tip = tipOf(chart);
    let svg = null, strong = null;
    series.forEach((part, number) => {
      const button = make("button", { type: "button", "aria-pressed": "true" }, legend);
      part.mark = make("i", {}, button);
      button.append(part.label);
      button.addEventListener("click", () => {
        if (!hidden.delete(number)) hidden.add(number);
        button.setAttribute("aria-pressed", String(!hidden.has(number)));
        redraw();
      });
      const point = (found) => () => {
        strong = found;
        if (!svg) return;
        for (const line of svg.querySelectorAll("[data-series]")) {
          line.classList.toggle("faint", strong !== null && +line.dataset.series !== strong);
        }
      };
      button.addEventListener("pointerenter", point(number));
      button.addEventListener("pointerleave", point(null));
    });
    const seeds = Math.max(...series.map((part) => part.numSeeds));
    make("p", { class: "note" }, place, (seeds > 1
      ? "A line is the mean over seeds; its band goes from the lowest seed to the highest. "
      : "One seed. ") + "Click a name to hide its line.");
    const across = make("p", { class: "note" }, place, "A thin line across: a method that sends nothing, at the round that validation chose, as in the results above.");
    const isUpward = () => what.value === "score" && column.isAccuracy;
    // A first value far above all that follows would press the rest flat.
    const chooseScale = () => {
      const drawn = series.map((part) => part.curves[what.value]).filter((curve) => curve && curve.step.length);
      const [least, most] = extremes(drawn.map((curve) => curve.mean));
      log.checked = !isUpward() && least > 0 && most > 10 * least;
    };
    chooseScale();
    what.addEventListener("change", chooseScale);

    function redraw() {
      if (svg) svg.remove();
      const width = Math.max(chart.clientWidth, 240), height = Math.min(400, Math.max(260, width * 0.5));
      const box = { left: 46, right: width - 14, top: 24, bottom: height - 42 };
      svg = draw("svg", { viewBox: "0 0 " + width + " " + height, height, role: "img", "aria-label": "learning curves" }, chart);
      const unit = (part) => (against.value === "bytes" ? part.bytesPerStep || 0 : against.value === "rounds" ? part.roundsPerStep || 0 : 1);
      for (const part of series) {
        const color = shade(part.color), dashes = "repeating-linear-gradient(90deg," + color + " 0 5px,transparent 5px 8px)";
        part.mark.style.background = part.dashed ? dashes : color;
      }
      const shown = series
        .map((part, number) => ({ part, number, curve: part.curves[what.value] }))
        .filter(({ curve, number }) => curve && curve.step.length && !hidden.has(number))
        .map((found) => ({ ...found, x: found.curve.step.map((step) => step * unit(found.part)) }));
      if (!shown.length) return;
      const moving = shown.filter(({ part }) => !part.sendsNothing);
      const far = extremes((moving.length ? moving : shown).map(({ x }) => x))[1] || 1;
      const isUp = isUpward();
      const [least, most] = extremes(shown.flatMap(({ curve }) => [curve.low, curve.high]));
      const ends = shown.map(({ curve }) => curve.mean[curve.mean.length - 1]);
      const isLog = !isUp && log.checked && least > 0;
      whole.parentElement.hidden = !isUp;
      log.parentElement.hidden = isUp || !(least > 0);
      const low = isLog ? least / 1.1 : isUp && whole.checked ? 0 : lowest(ends, least, isUp);
      hint.textContent = low > least ? "The scale follows the competing methods; what lies below is cut off." : "";
      const over = isLog ? most * 1.1 : most + ((most - low) || 1) * 0.03;
      const high = isUp ? (whole.checked ? 100 : Math.min(over, 100)) : over;
      const onAxis = (value) => (isLog ? Math.log10(value) : value), digits = isUp ? 1 : digitsOf(ends);
      const right = (x) => box.left + (x / far) * (box.right - box.left);
      const up = (y) => box.bottom - ((onAxis(y) - onAxis(low)) / (onAxis(high) - onAxis(low) || 1)) * (box.bottom - box.top);
      for (const value of isLog ? powers(low, high) : ticks(low, high, 6)) {
        draw("line", { class: "axis", x1: box.left, x2: box.right, y1: up(value), y2: up(value) }, svg);
        draw("text", { x: box.left - 6, y: up(value) + 4, "text-anchor": "end" }, svg, short(value));
      }
      for (const value of ticks(0, far, width < 500 ? 3 : 6)) {
        draw("text", { x: right(value), y: box.bottom + 16, "text-anchor": "middle" }, svg, short(value));
      }
      const words = { steps: "communication steps (one client taking part once)", rounds: "rounds", bytes: "bytes sent, up and down" };
      draw("text", { x: (box.left + box.right) / 2, y: height - 6, "text-anchor": "middle" }, svg, words[against.value]);
      draw("text", { x: 4, y: 12 }, svg, what.selectedOptions[0].textContent);
      const name = "clip" + place.id;
      const clip = draw("clipPath", { id: name }, draw("defs", {}, svg));
      draw("rect", { x: box.left - 4, y: box.top - 4, width: box.right - box.left + 8, height: box.bottom - box.top + 4 }, clip);
      const inside = draw("g", { "clip-path": "url(#" + name + ")" }, svg);
      const isAcross = ({ part, x }) => part.sendsNothing && part.chosen[what.value] !== null && (against.value === "bytes" || x[x.length - 1] < 0.98 * far);
      across.hidden = !shown.some(isAcross);
      for (const { part, number, curve, x } of shown) {
        const color = shade(part.color), chosen = part.chosen[what.value];
        const dashes = part.dashed ? { "stroke-dasharray": "6 4" } : {};
        const mark = { "data-series": number, stroke: color, ...dashes };
        // What ends early, or has no place on this axis, is seen beside the others all the same.
        if (isAcross({ part, x })) {
          draw("line", { ...mark, class: "line thin", x1: box.left, x2: box.right, y1: up(chosen), y2: up(chosen) }, inside);
          draw("text", { class: "named", x: box.left + 4, y: up(chosen) - 5 }, inside, part.label + " " + chosen.toFixed(digits));
        }
        if (part.sendsNothing && against.value === "bytes") continue;
        const point = (value, at) => right(x[at]).toFixed(1) + " " + up(value).toFixed(1);
        if (part.numSeeds > 1) {
          const edge = curve.high.map(point).concat(curve.low.map(point).reverse());
          draw("path", { class: "band", fill: color, "data-series": number, d: "M" + edge.join("L") + "Z" }, inside);
        }
        if (curve.mean.length === 1) draw("circle", { "data-series": number, fill: color, r: 3.5, cx: right(x[0]), cy: up(curve.mean[0]) }, inside);
        draw("path", { ...mark, class: "line", d: "M" + curve.mean.map(point).join("L") }, inside);
      }
      const rule = draw("line", { class: "rule", y1: box.top, y2: box.bottom, visibility: "hidden" }, svg);
      const left = () => { tip.hide(); rule.setAttribute("visibility", "hidden"); };
      onPointer(svg, (x, y) => {
        const at = ((x - box.left) / (box.right - box.left)) * far;
        if (at < 0 || at > far) return left();
        const lines = shown.map(({ part, curve, x: steps }) => {
          let from = 0, to = steps.length - 1;
          while (from < to) { const half = (from + to) >> 1; if (steps[half] < at) from = half + 1; else to = half; }
          if (part.sendsNothing && against.value === "bytes" && part.chosen[what.value] !== null) {
            return [part.chosen[what.value], part.label + "  " + part.chosen[what.value].toFixed(digits)];
          }
          const value = curve.mean[from], spread = (curve.high[from] - curve.low[from]) / 2;
          return [value, part.label + "  " + value.toFixed(digits) + (part.numSeeds > 1 ? " \u00b1 " + spread.toFixed(digits) : "")];
        });
        lines.sort((a, b) => (isUp ? b[0] - a[0] : a[0] - b[0]));
        rule.setAttribute("x1", x);
        rule.setAttribute("x2", x);
        rule.setAttribute("visibility", "visible");
        const head = { steps: "step ", rounds: "round ", bytes: "bytes " }[against.value] + short(Math.round(at));
        tip.show([head, ...lines.map((line) => line[1])].join("\n"), x, y);
      }, left);
    }

    for (const control of [what, against, whole, log]) control.addEventListener("change", redraw);
    return redraw;
  }

  // What is known of the clients of a column with the seed that is chosen.
  function people(column, seed) {
    const series = column.series.filter((part) => part.clients[seed]);
    const first = series[0].clients[seed], held = column.holds[first.split] || null;
    const names = column.names, classNames = column.classNames;
    const classWord = (number) => (classNames ? classNames[number] : "class " + number);
    const rows = first.examples.map((tested, number) => {
      const own = held ? [...held[number]].sort((a, b) => b[1] - a[1]) : [];
      return {
        number,
        name: names ? names[number] : "client " + number,
        tested,
        trained: held ? own.reduce((sum, pair) => sum + pair[1], 0) : null,
        held: own,
        main: own.length ? own[0][0] : null,
        scores: series.map((part) => part.clients[seed].score[number]),
        said: own.map(([label, count]) => classWord(label) + " " + count).join(", "),
        classes: own.map(([label]) => classWord(label)).join(", "),
      };
    });
    const digits = column.isAccuracy ? 1 : digitsOf(rows.flatMap((row) => row.scores));
    return { series, rows, held, classWord, digits };
  }

  function tellOf(row, lines) {
    const counts = row.trained === null ? row.tested + " test examples" : row.trained + " training, " + row.tested + " test examples";
    const classes = row.said.length > 60 ? row.said.slice(0, 58) + " \u2026" : row.said;
    return [row.name, ...lines, counts, classes].filter(Boolean).join("\n");
  }

  function clients(place, column) {
    const measured = column.series.filter((part) => Object.keys(part.clients).length);
    if (!measured.length) return null;
    const seeds = [...new Set(measured.flatMap((part) => Object.keys(part.clients)))].sort((a, b) => (isNaN(b) - isNaN(a)) || a - b);
    make("h3", {}, place, "Clients");
    const controls = make("div", { class: "controls" }, place);
    const seed = choice(controls, "seed", seeds.map((value) => [value, isNaN(value) ? value : "seed " + value]));
    const find = make("input", { type: "search", placeholder: "find a client or a class", "aria-label": "find a client or a class" }, controls);
    const isUp = column.isAccuracy, what = isUp ? "test accuracy in %" : lossWord(column);
    let now = people(column, seed.value), focus = null;
    const said = (score) => score.toFixed(now.digits) + (isUp ? " %" : column.isSquared ? " (root " + short(Math.sqrt(score)) + ")" : "");
    const bestOf = (scores) => (isUp ? Math.max : Math.min)(...scores.filter((score) => score !== null));
    const redraws = [];
    const all = () => redraws.forEach((redraw) => redraw());
    const turnTo = (number) => { focus = focus === number ? null : number; all(); };

    redraws.push(strip(), table(), held(), map());
    seed.addEventListener("change", () => { now = people(column, seed.value); all(); });
    return all;

    // Canvases share this: the nearest point within reach says who it is, and a click keeps it marked everywhere.
    function hovering(canvas, tip, points) {
      const nearest = (x, y) => {
        let near = null, least = 200;
        for (const point of points()) {
          const far = (point.x - x) ** 2 + (point.y - y) ** 2;
          if (far < least) { near = point; least = far; }
        }
        return near;
      };
      onPointer(canvas, (x, y) => {
        const near = nearest(x, y);
        canvas.style.cursor = near ? "pointer" : "";
        if (near) tip.show(near.text, near.x, near.y); else tip.hide();
      }, tip.hide);
      canvas.addEventListener("click", (event) => {
        const area = canvas.getBoundingClientRect(), near = nearest(event.clientX - area.left, event.clientY - area.top);
        if (near) turnTo(near.number);
      });
    }

    function strip() {
      const chart = make("div", { class: "chart dots" }, place), tip = tipOf(chart);
      const canvas = make("canvas", { role: "img", "aria-label": what + " of every client" }, chart);
      make("p", { class: "note" }, place, "A dot is a client's own " + what + "; the bar is the mean over clients, as at the right" + (isUp ? "" : ": every client counts the same, whatever its number of examples") + ". Click a dot to mark the client everywhere.");
      let points = [];
      hovering(canvas, tip, () => points);
      return () => {
        const { series, rows } = now, lane = series.length > 9 ? 30 : 36, width = Math.max(chart.clientWidth, 240);
        const height = series.length * lane + 34, pen = sheet(canvas, width, height);
        const words = Math.min(130, 12 + Math.max(...series.map((part) => pen.measureText(part.label).width)));
        const means = series.map((_, at) => {
          const known = rows.map((row) => row.scores[at]).filter((score) => score !== null);
          return known.length ? known.reduce((sum, score) => sum + score, 0) / known.length : null;
        });
        const meanWords = means.map((mean) => (mean === null ? "" : mean.toFixed(now.digits)));
        const box = { left: words, right: width - 20 - Math.max(...meanWords.map((text) => pen.measureText(text).width)), bottom: height - 26 };
        const [least, most] = extremes(rows.map((row) => row.scores));
        const [low, high] = isUp ? [Math.max(0, Math.floor((least - 3) / 10) * 10), 100] : [Math.min(least, 0), most];
        const right = (value) => box.left + ((value - low) / (high - low || 1)) * (box.right - box.left);
        pen.strokeStyle = ink("line");
        pen.fillStyle = ink("soft");
        pen.textAlign = "center";
        for (const value of ticks(low, high, width < 500 ? 4 : 8)) {
          pen.beginPath();
          pen.moveTo(right(value), 4);
          pen.lineTo(right(value), box.bottom);
          pen.stroke();
          pen.fillText(short(value), right(value), height - 10);
        }
        points = [];
        const marked = [];
        series.forEach((part, at) => {
          const middle = 4 + lane * (at + 0.5), known = rows.filter((row) => row.scores[at] !== null);
          pen.fillStyle = ink("ink");
          pen.textAlign = "right";
          pen.fillText(part.label, words - 8, middle + 4, words - 10);
          const mean = means[at];
          pen.textAlign = "left";
          pen.fillText(meanWords[at], box.right + 10, middle + 4);
          pen.fillStyle = shade(part.color);
          pen.globalAlpha = Math.max(0.3, Math.min(0.85, 60 / rows.length));
          for (const row of known) {
            const score = row.scores[at], x = right(score), y = middle + (((row.number * 0.618034) % 1) - 0.5) * lane * 0.62;
            const point = { x, y, number: row.number, text: tellOf(row, [part.label + "  " + said(score)]) };
            points.push(point);
            if (row.number === focus) marked.push(point);
            pen.beginPath();
            pen.arc(x, y, 3, 0, 7);
            pen.fill();
          }
          pen.globalAlpha = 1;
          pen.fillStyle = ink("ink");
          if (known.length) pen.fillRect(right(mean) - 1, middle - lane * 0.38, 2, lane * 0.76);
        });
        rings(pen, marked);
      };
    }

    function rings(pen, marked) {
      pen.strokeStyle = ink("ink");
      pen.lineWidth = 2;
      for (const { x, y } of marked) { pen.beginPath(); pen.arc(x, y, 6, 0, 7); pen.stroke(); }
      pen.lineWidth = 1;
    }

    function table() {
      const frame = make("div", { class: "clients", tabindex: "0", role: "region", "aria-label": "every client" }, place), body = make("table", {}, frame);
      const means = now.series.map((_, at) => now.rows.reduce((sum, row) => sum + (row.scores[at] || 0), 0));
      let left = [], lines = null;
      let order = { key: means.indexOf(bestOf(means)), isDown: !isUp };  // the best method's worst client first
      make("p", { class: "note" }, place, "Worst first by the marked column; click a heading to sort by it, a line to mark the client."
        + (seeds.length > 1 ? " Green: the best for that client with this seed; with another it may be another method." : ""));

      function fill() {
        const { series, rows, held } = now;
        const value = (row) => (typeof order.key === "string" ? row[order.key] : row.scores[order.key]);
        const mean = (row) => row.scores.reduce((sum, score) => sum + (score || 0), 0);
        const sorted = [...rows].sort((a, b) => {
          const one = value(a), other = value(b);
          if (one === null || other === null) return (one === null) - (other === null);
          const less = typeof one === "string" ? one.localeCompare(other, undefined, { numeric: true }) : one - other;
          return (order.isDown ? -less : less) || mean(a) - mean(b);
        });
        const keys = [["name", "client"], ...series.map((part, at) => [at, part.label]), ["tested", "test examples"]];
        if (held) keys.push(["trained", "training examples"], ["classes", "classes held"]);
        const heading = make("tr", {});
        for (const [key, words] of keys) {
          const cell = make("th", { scope: "col", tabindex: "0", ...(key === "classes" ? { class: "words" } : {}) }, heading, words);
          if (key === order.key) cell.setAttribute("aria-sort", order.isDown ? "descending" : "ascending");
          const sort = () => { order = { key, isDown: key === order.key && !order.isDown }; fill(); };
          cell.addEventListener("click", sort);
          cell.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
        }
        const wanted = find.value.toLowerCase();
        left = sorted.filter((row) => row.name.toLowerCase().includes(wanted) || row.classes.toLowerCase().includes(wanted));
        const head = make("thead", {});
        head.append(heading);
        lines = make("tbody", {});
        body.replaceChildren(head, lines);
        more();
      }

      // A browser takes long to lay out a table of thousands of lines: they come as one scrolls.
      function more() {
        const { held, digits } = now;
        for (const row of left.splice(0, 100)) {
          const line = make("tr", row.number === focus ? { class: "marked" } : {}, lines);
          make("th", { scope: "row" }, line, row.name);
          const best = bestOf(row.scores), isOpen = seeds.length > 1 && row.scores.some((score) => score !== best);
          const words = (score) => (isUp ? Math.round((score * row.tested) / 100) + " of " + row.tested + " right" : said(score));
          for (const score of row.scores) {
            const isBest = isOpen && score !== null && score === best;
            make("td", { ...(isBest ? { class: "best" } : {}), ...(score === null ? {} : { title: words(score) }) }, line, score === null ? "" : score.toFixed(digits));
          }
          make("td", {}, line, String(row.tested));
          if (held) {
            make("td", {}, line, String(row.trained));
            make("td", { class: "words", title: row.said }, line, row.classes.length > 60 ? row.classes.slice(0, 58) + " \u2026" : row.classes);
          }
          line.addEventListener("click", () => turnTo(row.number));
        }
      }

      frame.addEventListener("scroll", () => { if (frame.scrollTop + frame.clientHeight > frame.scrollHeight - 600) more(); });
      find.addEventListener("input", fill);
      return fill;
    }

    function held() {
      if (!Object.keys(column.holds).length) return () => {};
      make("h3", {}, place, "Who holds which classes");
      const bar = make("div", { class: "controls" }, place);
      const order = choice(bar, "order of clients", [["number", "clients in their order"], ["name", "clients by name"], ["classes", "clients by classes held"]]);
      const legend = make("div", { class: "legend" }, place);
      const frame = make("div", { class: "chart classes" }, place), tip = tipOf(frame), scroll = make("div", { class: "scroll" }, frame);
      const canvas = make("canvas", { role: "img", "aria-label": "training examples of each class that every client has" }, scroll);
      make("p", { class: "note" }, place, "The stronger a field, the more training examples of that class the client has; an empty field: none.");
      let at = () => null;

      function redraw() {
        const { rows, held, classWord } = now;
        frame.hidden = legend.hidden = !held;
        if (!held) return;
        const count = column.numClasses, cell = count <= 6 ? 30 : count <= 12 ? 22 : count <= 30 ? 14 : count <= 110 ? 7 : 3;
        const key = { number: (row) => row.number, name: (row) => row.name, classes: (row) => row.held.map((pair) => pair[0]).sort((a, b) => a - b).map((label) => String(label).padStart(5, "0")).join() }[order.value];
        const sorted = [...rows].sort((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : a.number - b.number));
        const probe = sheet(canvas, 10, 10), top = 5;
        const labelled = Math.max(1, Math.ceil(13 / cell));
        const names = Array.from({ length: count }, (_, label) => classWord(label));
        const left = Math.min(140, 12 + Math.max(...names.map((name) => probe.measureText(name).width)));
        const room = Math.max(frame.clientWidth, 240) - left - 4, wide = Math.max(3, Math.min(110, room / rows.length));
        const isNamed = wide >= 13, isLevel = rows.every((row) => probe.measureText(row.name).width < wide - 4);
        const under = isLevel ? 20 : isNamed ? Math.min(90, 10 + Math.max(...rows.map((row) => probe.measureText(row.name).width))) : 8;
        const width = Math.ceil(left + wide * rows.length + 4), height = top + count * cell + under, pen = sheet(canvas, width, height);
        const most = Math.max(1, ...rows.flatMap((row) => row.held.map((pair) => pair[1])));
        pen.textAlign = "right";
        names.forEach((name, label) => {
          pen.fillStyle = ink("raised");
          pen.fillRect(left, top + label * cell, wide * rows.length, cell - 1);
          pen.fillStyle = ink("soft");
          if (label % labelled === 0) pen.fillText(name, left - 8, top + label * cell + cell / 2 + 4, left - 10);
        });
        const color = shade("#0072b2"), gap = wide > 6 ? 1 : 0, strength = (number) => 0.2 + 0.8 * Math.sqrt(number / most);
        const hasNumbers = cell >= 13 && wide >= probe.measureText(String(most)).width + 6;
        pen.textAlign = "center";
        sorted.forEach((row, column) => {
          for (const [label, number] of row.held) {
            pen.fillStyle = color;
            pen.globalAlpha = strength(number);
            pen.fillRect(left + column * wide, top + label * cell, wide - gap, cell - 1);
            pen.globalAlpha = 1;
            if (!hasNumbers) continue;
            pen.fillStyle = strength(number) > 0.6 && !isDark.matches ? "#fff" : strength(number) > 0.6 ? "#000" : ink("ink");
            pen.fillText(number, left + (column + 0.5) * wide, top + (label + 0.5) * cell + 4);
          }
        });
        legend.replaceChildren();
        const scale = make("span", {}, legend);
        scale.append("1 ");
        const stops = [1 / most, 0.1, 0.25, 0.5, 0.75, 1].filter((share) => share >= 1 / most);
        make("i", { class: "ramp" }, scale).style.background = "linear-gradient(90deg," + stops
          .map((share) => "color-mix(in srgb," + color + " " + Math.round(100 * strength(share * most)) + "%," + ink("raised") + ") " + Math.round(100 * share) + "%").join() + ")";
        scale.append(short(most) + " training examples");
        sorted.forEach((row, column) => {
          if (row.number === focus) {
            pen.strokeStyle = ink("ink");
            pen.lineWidth = 2;
            pen.strokeRect(left + column * wide - 1, top - 1, wide + 1, count * cell + 1);
          }
          if (isLevel) {
            pen.fillStyle = ink("soft");
            pen.textAlign = "center";
            pen.fillText(row.name, left + (column + 0.5) * wide, top + count * cell + 14);
          }
          if (isLevel || !isNamed) return;
          pen.save();
          pen.translate(left + (column + 0.5) * wide + 4, top + count * cell + 8);
          pen.rotate(-Math.PI / 2);
          pen.fillStyle = ink("soft");
          pen.textAlign = "right";
          pen.fillText(row.name, 0, 0, under);
          pen.restore();
        });
        at = (x, y) => {
          const row = sorted[Math.floor((x - left) / wide)], label = Math.floor((y - top) / cell);
          if (!row || x < left) return null;
          const pair = row.held.find((part) => part[0] === label), isClass = label >= 0 && label < count;
          return { row, text: tellOf(row, isClass ? [classWord(label) + ": " + (pair ? pair[1] : 0) + " training examples"] : []) };
        };
      }

      onPointer(canvas, (x, y) => {
        const found = at(x, y);
        if (found) tip.show(found.text, x - scroll.scrollLeft, y); else tip.hide();
      }, tip.hide);
      canvas.addEventListener("click", (event) => {
        const area = canvas.getBoundingClientRect(), found = at(event.clientX - area.left, event.clientY - area.top);
        if (found) turnTo(found.row.number);
      });
      order.addEventListener("change", redraw);
      return redraw;
    }

    function map() {
      const mapped = column.series.filter((part) => Object.keys(part.maps).length);
      if (!mapped.length) return () => {};
      make("h3", {}, place, "Client map");
      const bar = make("div", { class: "controls" }, place);
      const which = choice(bar, "method", mapped.map((part, number) => [number, part.label]));
      const by = choice(bar, "colored by", [
        ["main", "colored by main class"], ["score", isUp ? "colored by accuracy" : column.isSquared ? "colored by squared error" : "colored by loss"], ["examples", "colored by number of examples"],
      ]);
      if (new Set(now.rows.map((row) => row.main)).size > 12) by.value = "score";  // too many colors to tell apart
      const legend = make("div", { class: "legend" }, place);
      const chart = make("div", { class: "chart map" }, place), tip = tipOf(chart);
      const canvas = make("canvas", { role: "img", "aria-label": "the embeddings of all clients in a plane" }, chart);
      const note = make("p", { class: "note" }, place);
      let points = [];
      hovering(canvas, tip, () => points);

      function redraw() {
        const part = mapped[+which.value], drawn = part.maps[seed.value], { rows, series, classWord, held } = now;
        chart.hidden = legend.hidden = !drawn;
        note.textContent = drawn
          ? "Clients whose embeddings are alike lie together." + (Math.round(100 * drawn.variance) === 100 ? "" : " The plane is the one in which they differ most (principal components); it shows " + Math.round(100 * drawn.variance) + " % of their variance.")
          : isNaN(seed.value) ? "Each fold has its own map: choose one above." : "There is no map of this seed.";
        points = [];
        if (!drawn) return;
        if (!held) by.querySelector("[value=main]")?.remove();
        const width = Math.max(240, Math.min(chart.clientWidth, 760)), height = Math.round(Math.min(width, 460)), pen = sheet(canvas, width, height);
        const [left, right] = extremes([drawn.places.map((place) => place[0])]), [low, high] = extremes([drawn.places.map((place) => place[1])]);
        const scale = Math.min((width - 60) / (right - left || 1), (height - 50) / (high - low || 1));  // the same for both
        const x = (value) => width / 2 + (value - (left + right) / 2) * scale, y = (value) => height / 2 - (value - (low + high) / 2) * scale;
        const number = series.indexOf(part), mains = [...new Set(rows.map((row) => row.main))].filter((main) => main !== null).sort((a, b) => a - b);
        const value = { main: (row) => row.main, score: (row) => row.scores[number], examples: (row) => (row.trained === null ? row.tested : row.trained) }[by.value];
        const [from, to] = by.value === "main" ? [0, 0] : extremes([rows.map(value)]);
        const color = (row) => {
          const found = value(row);
          if (found === null) return ink("soft");
          return by.value === "main" ? hue(mains.indexOf(found), mains.length) : onScale((found - from) / (to - from || 1));
        };
        legend.replaceChildren();
        if (by.value === "main") {
          mains.slice(0, 30).forEach((main, place) => {
            const item = make("span", {}, legend);
            make("i", { class: "dot" }, item).style.background = hue(place, mains.length);
            item.append(classWord(main));
          });
          if (mains.length > 30) make("span", {}, legend, "and " + (mains.length - 30) + " more");
        } else {
          const unit = by.value === "score" && isUp ? " %" : "", item = make("span", {}, legend);
          item.append(short(from) + unit + " ");
          make("i", { class: "ramp" }, item).style.background = "linear-gradient(90deg," + [0, 0.25, 0.5, 0.75, 1].map(onScale).join() + ")";
          item.append(short(to) + unit);
        }
        pen.strokeStyle = ink("line");
        pen.strokeRect(0.5, 0.5, width - 1, height - 1);
        const size = rows.length > 300 ? 3 : rows.length > 80 ? 4.5 : 6;
        const marked = [];
        rows.forEach((row) => {
          const place = drawn.places[row.number], score = row.scores[number];
          const point = { x: x(place[0]), y: y(place[1]), number: row.number, name: row.name, text: tellOf(row, score === null || score === undefined ? [] : [part.label + "  " + said(score)]) };
          points.push(point);
          if (row.number === focus) marked.push(point);
          pen.fillStyle = color(row);
          pen.globalAlpha = rows.length > 300 ? 0.75 : 1;
          pen.beginPath();
          pen.arc(point.x, point.y, size, 0, 7);
          pen.fill();
        });
        pen.globalAlpha = 1;
        rings(pen, marked);
        if (column.names || marked.length) named(pen, points, marked, size, width, height);
      }

      // A name beside every point that has room for one.
      function named(pen, points, marked, size, width, height) {
        const taken = points.map((point) => [point.x - size, point.y - size, point.x + size, point.y + size]);
        pen.fillStyle = ink("ink");
        pen.textAlign = "left";
        for (const point of [...marked, ...(points.length <= 120 ? points : [])]) {
          const long = pen.measureText(point.name).width;
          const boxes = [[point.x + size + 3, point.y + 4], [point.x - size - 3 - long, point.y + 4], [point.x - long / 2, point.y - size - 4], [point.x - long / 2, point.y + size + 13]];
          const spot = boxes.find(([left, line]) => {
            const box = [left - 1, line - 10, left + long + 1, line + 2];
            if (box[0] < 2 || box[2] > width - 2 || box[1] < 2 || box[3] > height - 2) return false;
            return taken.every((other) => box[2] < other[0] || box[0] > other[2] || box[3] < other[1] || box[1] > other[3]);
          });
          if (!spot) continue;
          taken.push([spot[0] - 1, spot[1] - 10, spot[0] + long + 1, spot[1] + 2]);
          pen.fillText(point.name, spot[0], spot[1]);
        }
      }

      which.addEventListener("change", redraw);
      by.addEventListener("change", redraw);
      return redraw;
    }
  }

  // "2.6 GB", "1 h 05 min", "5,000 + 1,000" and "88.1 ± 0.4" as numbers.
  function size(text) {
    const units = { TB: 1e12, GB: 1e9, MB: 1e6, kB: 1e3, B: 1, h: 3600, min: 60, s: 1 };
    const parts = [...text.split(/\u00b1|paper| to |\(/)[0].matchAll(/(-?\d[\d,]*\.?\d*)(?:\s*(TB|GB|MB|kB|B|h|min|s)\b)?/g)];
    return parts.length ? parts.reduce((sum, [, value, unit]) => sum + parseFloat(value.replace(/,/g, "")) * (units[unit] || 1), 0) : NaN;
  }

  function sortable(table) {
    const body = table.tBodies[0], first = [...body.rows];
    [...table.tHead.rows[0].cells].forEach((cell, place) => {
      cell.tabIndex = 0;
      const sort = () => {
        const isDown = cell.getAttribute("aria-sort") === "ascending";
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        cell.setAttribute("aria-sort", isDown ? "descending" : "ascending");
        const key = (row) => row.cells[place].textContent;
        const sorted = [...first].sort((a, b) => {
          if (place === 0) return (isDown ? -1 : 1) * key(a).localeCompare(key(b));
          const one = size(key(a)), other = size(key(b));
          if (isNaN(one) || isNaN(other)) return isNaN(one) && isNaN(other) ? key(a).localeCompare(key(b)) : isNaN(one) - isNaN(other);
          return isDown ? other - one : one - other;
        });
        body.append(...sorted);
      };
      cell.addEventListener("click", sort);
      cell.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
    });
  }

  // What goes on beside the right edge fades out there, so that nobody takes a cut heading for the last.
  function fading(frame) {
    const look = () => frame.classList.toggle("more", frame.scrollLeft + frame.clientWidth < frame.scrollWidth - 1);
    frame.addEventListener("scroll", look);
    return look;
  }

  const redraws = [];
  for (const place of document.querySelectorAll(".charts")) {
    const column = data[place.dataset.report][place.dataset.column];
    redraws.push(...[curves(place, column), clients(place, column)].filter(Boolean));
  }
  document.querySelectorAll("table.sortable").forEach(sortable);
  redraws.push(...[...document.querySelectorAll(".table, .clients")].map(fading));
  const all = () => redraws.forEach((redraw) => redraw());
  let waiting = 0, wide = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === wide) return;  // a phone's address bar comes and goes
    wide = innerWidth;
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(all);
  });
  isDark.addEventListener("change", all);
  all();
})();
