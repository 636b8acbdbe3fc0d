"use strict";
// Shows the state of a server and asks for it again every few seconds. Words reach the page as text, never as markup.
// What it holds does not grow: every answer replaces the one before, and the server bounds each.
(() => {
  const SECONDS = 3, SECONDS_HIDDEN = 30, SECONDS_OF_PATIENCE = 15;
  const SVG = "http://www.w3.org/2000/svg";
  const TINTS = ["first", "second", "third", "fourth"];
  const REASONS = {
    silent: "did not answer in time", lost: "could not be reached", norm: "sent an update that is too large",
    finite: "sent numbers that are not finite", layout: "sent other shapes or types than the network has",
    late: "answered after the question was closed", round: "answered for another round", stale: "trained on weights that are too old",
    signature: "sent a message without the party's signature", form: "sent what cannot be read", size: "sent too many bytes, or changed its number of examples",
    scores: "sent scores that its examples cannot give", version: "lacked the version that was asked for", budget: "has no privacy budget left",
    party: "could not answer, for a reason of its own", unfit: "sent what the server could not use", hello: "described itself wrongly",
    extra: "sent a wrong extra value", kind: "answered another question", run: "answered for another run", stranger: "is not enrolled",
    consent: "did not consent",
  };
  const at = (id) => document.getElementById(id);
  let state = null, curves = null, offset = 0, heard = 0, marked = null, timer = 0;

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

  // Fill an element anew only if what it shows has changed: what is selected in it stays, and nothing flickers.
  const filled = new Map();
  function fill(id, shown, make) {
    const key = JSON.stringify(shown);
    if (filled.get(id) === key) return false;
    filled.set(id, key);
    const element = at(id), top = element.scrollTop;
    element.replaceChildren();
    make(element);
    element.scrollTop = top;
    return true;
  }

  function short(value) {
    for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (Math.abs(value) >= size) return +(value / size).toPrecision(3) + "\u00a0" + unit;
    }
    return +value.toPrecision(3) + "\u00a0";
  }
  const bytes = (value) => (value === undefined || value === null ? "" : short(value) + "B");
  const count = (number, word, words) => number.toLocaleString("en") + " " + (number === 1 ? word : words);

  function ago(seconds) {
    const whole = Math.max(0, Math.round(seconds));
    if (whole < 90) return whole + " s";
    if (whole < 5400) return Math.round(whole / 60) + " min";
    if (whole < 172800) return Math.round(whole / 3600) + " h";
    return Math.round(whole / 86400) + " days";
  }

  function clock(seconds) {
    const date = new Date(seconds * 1000), now = new Date();
    const hour = date.toLocaleTimeString("en-GB");
    return date.toDateString() === now.toDateString() ? hour : date.toISOString().slice(0, 10) + " " + hour;
  }

  function said(value) {
    if (value === null || value === undefined) return "";
    return curves && curves.is_loss ? String(+value.toPrecision(4)) : (100 * value).toFixed(1) + " %";
  }

  // Charts.

  function ticks(low, high, number) {
    const rough = (high - low || 1) / number, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((part) => part * power).find((part) => part >= rough * 0.999);
    const found = [];
    for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step / 1e6; value += step) found.push(value || 0);  // never -0
    return found;
  }

  function path(xs, values, right, down) {
    let line = "", isOpen = false;
    values.forEach((value, place) => {
      if (value !== null) line += (isOpen ? "L" : "M") + right(xs[place]).toFixed(1) + " " + down(value).toFixed(1);
      isOpen = value !== null;
    });
    return line;
  }

  const cut = (text, letters) => (text.length > letters ? text.slice(0, letters - 1) + "\u2026" : text);

  // Draws {xs, lines: [{values, tint, name, isMean}], band, words, x, y, tell}; the newest drawing replaces the one before.
  function chart(place, { xs, lines, band, words, x, y, tell, floor, ceiling }) {
    const width = Math.max(place.clientWidth, 260), height = Math.round(Math.min(380, Math.max(230, width * 0.42)));
    const named = lines.filter((line) => line.name && line.values.some((value) => value !== null));
    const letters = width < 500 ? 12 : 20, longest = Math.max(0, ...named.map((line) => cut(line.name, letters).length));
    const box = { left: 52, right: width - 12 - Math.min(7 * longest + 8, width / 3), top: 12, bottom: height - 42 };
    const all = [...lines.map((line) => line.values), ...(band ? [band.low, band.high] : [])].flat().filter((value) => value !== null);
    let low = Math.min(...all), high = Math.max(...all);
    const margin = 0.06 * (high - low) || Math.abs(0.05 * high) || 1;
    low = Math.max(floor, low - margin);
    high = Math.min(ceiling, high + margin);
    const from = xs[0], to = xs[xs.length - 1] === from ? from + 1 : xs[xs.length - 1];
    const right = (value) => box.left + ((value - from) / (to - from)) * (box.right - box.left);
    const down = (value) => box.bottom - ((value - low) / (high - low)) * (box.bottom - box.top);

    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words }, document.createDocumentFragment());
    for (const value of ticks(low, high, 5)) {
      draw("line", { class: "axis", x1: box.left, x2: box.right, y1: down(value), y2: down(value) }, svg);
      draw("text", { x: box.left - 8, y: down(value) + 4, "text-anchor": "end" }, svg, y.tick(value));
    }
    for (const value of x.ticks(from, to, Math.max(2, Math.floor((box.right - box.left) / x.room)))) {
      draw("text", { x: right(value), y: box.bottom + 18, "text-anchor": "middle" }, svg, x.tick(value));
    }
    draw("text", { x: (box.left + box.right) / 2, y: height - 6, "text-anchor": "middle" }, svg, x.name);
    if (band) {
      const there = xs.map((_, number) => number).filter((number) => band.low[number] !== null);
      const edge = (values, order) => order.map((number) => right(xs[number]) + "," + down(values[number])).join(" ");
      draw("polygon", { class: "band", points: edge(band.high, there) + " " + edge(band.low, [...there].reverse()) }, svg);
    }
    for (const line of lines) {
      draw("path", { class: `line tint-${line.tint}` + (line.isMean ? " mean" : ""), d: path(xs, line.values, right, down) }, svg);
      const points = line.values.flatMap((value, number) => (value === null ? [] : [[xs[number], value]]));
      if (points.length === 1) draw("circle", { class: `tint-${line.tint}`, r: 3, cx: right(points[0][0]), cy: down(points[0][1]) }, svg);
    }
    // Names at the ends of lines, moved apart until none covers another.
    const ends = named.map((line) => ({ line, y: down(line.values.findLast((value) => value !== null)) })).sort((a, b) => a.y - b.y);
    ends.forEach((end, number) => { if (number) end.y = Math.max(end.y, ends[number - 1].y + 14); });
    let most = height - 30;
    for (const end of [...ends].reverse()) { end.y = Math.min(end.y, most); most = end.y - 14; }
    for (const end of ends) {
      draw("text", { class: `named tint-${end.line.tint}`, x: box.right + 7, y: end.y + 4 }, svg, cut(end.line.name, letters));
    }
    const rule = draw("line", { class: "rule", y1: box.top, y2: box.bottom, visibility: "hidden" }, svg);
    const tip = make("div", { class: "tip", role: "status" });
    const hide = () => { tip.style.display = "none"; rule.setAttribute("visibility", "hidden"); };
    const show = (event) => {
      const area = svg.getBoundingClientRect(), wanted = (event.clientX - area.left) * (width / area.width);
      let best = 0;
      xs.forEach((value, number) => { if (Math.abs(right(value) - wanted) < Math.abs(right(xs[best]) - wanted)) best = number; });
      const x0 = right(xs[best]);
      rule.setAttribute("x1", x0);
      rule.setAttribute("x2", x0);
      rule.setAttribute("visibility", "visible");
      tip.textContent = tell(best);
      tip.style.display = "block";
      const isRight = x0 + 16 + tip.offsetWidth <= place.clientWidth;
      tip.style.left = Math.max(0, isRight ? x0 + 16 : x0 - tip.offsetWidth - 16) + "px";
      tip.style.top = box.top + "px";
    };
    svg.addEventListener("pointermove", show);
    svg.addEventListener("pointerdown", show);
    svg.addEventListener("pointerleave", hide);
    place.replaceChildren(svg, tip);
  }

  const rounds = {
    name: "round", room: 60, tick: (value) => value.toLocaleString("en"),
    ticks: (low, high, number) => ticks(low, high, number).filter((value) => Number.isInteger(value)),
  };
  const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 345600, 604800, 1209600];
  const times = {
    name: "time", room: 90, step: 1,
    tick(value) {
      const date = new Date(value * 1000), day = date.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
      const hour = date.toLocaleTimeString("en-GB").slice(0, times.step < 60 ? 8 : 5);
      return times.step >= 86400 ? day : hour === "00:00" ? day : hour;
    },
    ticks(low, high, number) {
      times.step = STEPS.find((step) => (high - low) / step <= number) || STEPS[STEPS.length - 1] * Math.ceil((high - low) / number / STEPS[STEPS.length - 1]);
      const shift = new Date(low * 1000).getTimezoneOffset() * 60, found = [];
      for (let value = Math.ceil((low - shift) / times.step) * times.step + shift; value <= high; value += times.step) found.push(value);
      return found;
    },
  };

  function drawScores() {
    const has = curves !== null && curves.rounds.length > 0;
    at("scores").hidden = !has;
    if (!has) return;
    const split = curves.splits[at("split").value], names = Object.keys(split.parties), isFew = names.length <= TINTS.length;
    const lines = names.map((name, number) => ({
      name: isFew || name === marked ? name : "",
      values: split.parties[name],
      tint: name === marked && !isFew ? "second" : isFew ? TINTS[number] : "context",
    }));
    if (!isFew) {
      lines.sort((a, b) => (a.name === marked && marked !== null) - (b.name === marked && marked !== null));
      lines.push({ name: "all", values: split.mean, tint: "first", isMean: true });
    } else {
      lines.push({ name: names.length > 1 ? "all" : "", values: split.mean, tint: "ink", isMean: true });
    }
    if (!lines.some((line) => line.values.some((value) => value !== null))) {
      filled.delete("scores");
      at("scores-chart").replaceChildren(make("p", { class: "note" }, null, "No party sends scores of this split."));
      at("scores-note").textContent = "";
      return;
    }
    const hasMore = state !== null && state.num_parties > names.length;
    const kind = curves.is_loss ? "loss" : "accuracy";
    chart(at("scores-chart"), {
      xs: curves.rounds,
      lines,
      band: hasMore ? split : null,
      words: kind + " of each party by round",
      x: rounds,
      y: { tick: (value) => (curves.is_loss ? String(+value.toPrecision(3)) : +(100 * value).toFixed(1) + " %") },
      floor: 0,
      ceiling: curves.is_loss ? Infinity : 1,
      tell: (place) => {
        const shown = names.map((name) => [name, split.parties[name][place]]).filter(([, value]) => value !== null);
        shown.sort((a, b) => (curves.is_loss ? b[1] - a[1] : a[1] - b[1]));
        const worst = shown.length > 8 ? [...shown.slice(0, 8), ["and " + (shown.length - 8) + " more", null]] : shown;
        return ["round " + curves.rounds[place], "all  " + said(split.mean[place]), ...worst.map(([name, value]) => name + (value === null ? "" : "  " + said(value)))].join("\n");
      },
    });
    at("scores-note").textContent = (curves.is_loss ? "Loss over each party's examples; lower is better. " : "Accuracy over each party's examples. ")
      + "\u201cAll\u201d is over the examples of all parties."
      + (hasMore ? ` The first ${names.length} parties are drawn; the band goes from the lowest to the highest of all.` : "")
      + (isFew ? "" : " Point at a party in the table to see its line.");
  }

  function drawTraffic() {
    const has = curves !== null && curves.samples.time.length > 1;
    at("traffic").hidden = !has;
    if (!has) return;
    const { time, round, down, up } = curves.samples;
    chart(at("traffic-chart"), {
      xs: time,
      lines: [{ name: "to parties", values: down, tint: "first" }, { name: "from parties", values: up, tint: "second" }],
      words: "bytes of all messages since the server started",
      x: times,
      y: { tick: (value) => short(value) + "B" },
      floor: 0,
      ceiling: Infinity,
      tell: (place) => [clock(time[place]), "round " + round[place], "to parties  " + bytes(down[place]), "from parties  " + bytes(up[place])].join("\n"),
    });
  }

  // Everything else.

  function standing(status) {
    if (status.round === undefined) return "The server is starting.";
    if (status.has_ended) return `Training has ended after ${count(status.num_rounds, "round", "rounds")}; round ${status.chosen} was chosen.`;
    const missing = state.num_parties - state.num_present;
    if (!status.has_started) return `Waiting for parties: ${state.num_present} connected.`;
    const away = missing > 0 ? `; ${count(missing, "party is", "parties are")} away` : "";
    return `Training: round ${status.round.toLocaleString("en")} of ${status.num_rounds.toLocaleString("en")}${away}.`;
  }

  function showTiles(status) {
    const total = Object.values(state.refused).reduce((sum, number) => sum + number, 0);
    const since = state.updated === null ? "" : "last " + ago(state.now - state.updated) + " ago";
    const scores = status.scores || {};
    const tiles = [
      ["Connected", `${state.num_present} of ${state.num_parties}`, ""],
      ["Updates accepted", (status.accepted || 0).toLocaleString("en"), since],
      ["To parties", bytes(status.wire_down || 0), `weights ${bytes(status.bytes_down || 0)}`],
      ["From parties", bytes(status.wire_up || 0), `updates ${bytes(status.bytes_up || 0)}`],
      ["Answers refused", total.toLocaleString("en"), state.counts.strangers ? `${count(state.counts.strangers, "request", "requests")} of strangers` : ""],
    ];
    if (Object.keys(scores).length) {
      const [[first, value], ...others] = Object.entries(scores), more = others.map(([split, value]) => `${split} ${said(Math.abs(value))}`);
      const name = first[0].toUpperCase() + first.slice(1) + (curves && curves.is_loss ? " loss" : " accuracy");
      tiles.splice(2, 0, [name, said(Math.abs(value)), [...more, `round ${status.evaluated}`].join(", ")]);
    }
    fill("tiles", tiles, (list) => {
      for (const [name, value, more] of tiles) {
        const tile = make("div", {}, list);
        make("dt", {}, tile, name);
        const said = make("dd", {}, tile, value);
        if (more) make("small", {}, said, more);
      }
    });
  }

  function heading(table, ...names) {
    const line = make("tr", {}, make("thead", {}, table));
    for (const [name, kind] of names) make("th", { scope: "col", ...(kind ? { class: kind } : {}) }, line, name);
    return make("tbody", {}, table);
  }

  function privacyOf(party) {
    const spent = typeof party.epsilon === "number" ? "epsilon " + party.epsilon.toFixed(2) : "";
    return party.is_spent ? ["budget spent", spent].filter(Boolean).join(", ") : spent;
  }

  function showParties() {
    const hasPrivacy = state.parties.some((party) => privacyOf(party));
    fill("parties", [state.parties, hasPrivacy, curves && curves.is_loss], (table) => {
      const names = [["party"], ["state", "words"], ["last round"], ["validation"], ["test"], ["examples"], ["network", "words"], ["refused", "words"]];
      const body = heading(table, ...names, ...(hasPrivacy ? [["privacy", "words"]] : []));
      for (const party of state.parties) {
        const line = make("tr", { "data-party": party.name, ...(party.name === marked ? { class: "marked" } : {}) }, body);
        make("th", { scope: "row" }, line, party.name);
        const isWrong = party.is_aside || !party.is_present;
        make("td", { class: "words" + (isWrong ? " is-warning" : "") }, line, party.is_aside ? "suspended" : party.is_present ? "connected" : "away");
        make("td", {}, line, party.last_round === null ? "" : String(party.last_round));
        for (const split of ["validation", "test"]) make("td", {}, line, said(party.scores && party.scores[split]));
        make("td", {}, line, party.size.toLocaleString("en"));
        make("td", { class: "words" }, line, party.architecture);
        make("td", { class: "words" }, line, Object.entries(party.refused).map(([reason, number]) => `${reason} ${number}`).join(", "));
        if (hasPrivacy) make("td", { class: "words" }, line, privacyOf(party));
        line.addEventListener("pointerenter", () => mark(party.name));
        line.addEventListener("click", () => mark(party.name));
      }
    });
    const hidden = state.num_parties - state.parties.length;
    at("parties-note").textContent = state.num_parties === 0 ? "No party has connected yet." : hidden > 0 ? `${count(hidden, "party is", "parties are")} not listed; see pfedhn status.` : "";
  }

  function mark(name) {
    if (marked === name) return;
    marked = name;
    for (const line of document.querySelectorAll("#parties tbody tr")) line.classList.toggle("marked", line.dataset.party === name);
    drawScores();
  }

  function showAcross(found) {
    at("across").hidden = !found;
    if (!found) return;
    fill("matrix", found, (table) => {
      const body = heading(table, ["site \\ model"], ...found.models.map((name) => [name]));
      found.sites.forEach((site, row) => {
        const line = make("tr", {}, body);
        make("th", { scope: "row" }, line, site);
        found.scores[row].forEach((value, column) => {
          const kinds = [found.best[row] === found.models[column] ? "best" : "", found.models[column] === site ? "own" : ""].join(" ").trim();
          const shown = value === null ? "" : found.is_loss ? String(+value.toPrecision(4)) : (100 * value).toFixed(1);
          make("td", kinds ? { class: kinds } : {}, line, shown);
        });
      });
    });
    fill("findings", found.findings, (list) => { for (const sentence of found.findings) make("li", {}, list, sentence); });
    at("across-note").textContent = found.note;
  }

  function showRefusals() {
    const reasons = Object.entries(state.refused).sort((a, b) => b[1] - a[1]);
    at("refusals").hidden = !reasons.length;
    fill("reasons", reasons, (table) => {
      const body = heading(table, ["reason"], ["count"], ["the party", "words"]);
      for (const [reason, number] of reasons) {
        const line = make("tr", {}, body);
        make("th", { scope: "row" }, line, reason);
        make("td", {}, line, number.toLocaleString("en"));
        make("td", { class: "words" }, line, REASONS[reason] || "");
      }
    });
  }

  function showEvents() {
    fill("events", state.events, (list) => {
      if (!state.events.length) make("li", {}, list, "Nothing has happened yet.");
      for (const event of state.events) {
        const line = make("li", {}, list);
        make("time", {}, line, clock(event.time));
        make("span", {}, line, event.text + (event.count > 1 ? ` (${event.count} times)` : ""));
      }
    });
  }

  function show() {
    const { about, status } = state;
    document.title = (status.num_rounds ? `${status.has_ended ? "ended" : status.round + "/" + status.num_rounds} \u00b7 ` : "") + about.name;
    at("name").textContent = about.name;
    at("about").textContent = [about.method, about.network, about.address, `server up for ${ago(state.now - state.began)}`].filter(Boolean).join(" \u00b7 ");
    at("standing").textContent = standing(status);
    at("progress").max = status.num_rounds || 1;
    at("progress").value = status.round || 0;
    showTiles(status);
    showParties();
    showAcross(state.across);
    showRefusals();
    showEvents();
    const parts = [`pfedhn ${about.version}, run ${about.run}.`, `This page asks again every ${SECONDS} s and changes nothing.`];
    if (status.record_head) parts.push(`Head of the record: ${status.record_head}.`);
    at("footer").textContent = parts.join(" ");
    for (const frame of document.querySelectorAll(".table")) fade(frame);
  }

  // A table that goes on at the right fades out there.
  function fade(frame) {
    frame.classList.toggle("more", frame.scrollLeft + frame.clientWidth < frame.scrollWidth - 1);
  }

  async function ask(address) {
    const answer = await fetch(address, { signal: AbortSignal.timeout(SECONDS_OF_PATIENCE * 1000), cache: "no-store" });
    if (answer.status === 401) throw new Error("token");
    if (!answer.ok) throw new Error("code " + answer.status);
    return answer.json();
  }

  async function update() {
    clearTimeout(timer);
    try {
      const found = await ask("state");
      const isNew = curves === null || found.num_evaluations !== curves.num_evaluations || (found.status.wire_down || 0) !== offset;
      state = found;
      heard = Date.now() / 1000;
      if (isNew) {
        curves = await ask("curves");
        offset = found.status.wire_down || 0;
        drawScores();
        drawTraffic();
      }
      at("away").hidden = true;
      show();
    } catch (error) {
      at("away").hidden = false;
      const isToken = error.message === "token", code = error.message.startsWith("code") ? ` (${error.message})` : "";
      at("away").textContent = isToken ? "The token has changed; open the address with the new one."
        : (heard ? `The server has not answered${code} since ${clock(heard)}; what follows is from then.` : `The server does not answer${code}.`) + " This page keeps asking.";
    }
    clearTimeout(timer);
    timer = setTimeout(update, (document.hidden ? SECONDS_HIDDEN : SECONDS) * 1000);
  }

  document.addEventListener("visibilitychange", () => { if (!document.hidden) update(); });
  at("split").addEventListener("change", drawScores);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;  // phones change the height as one scrolls
    width = innerWidth;
    drawScores();
    drawTraffic();
    for (const frame of document.querySelectorAll(".table")) fade(frame);
  });
  for (const frame of document.querySelectorAll(".table")) frame.addEventListener("scroll", () => fade(frame));
  update();
})();
