// The report's pictures: timelines and lanes (uPlot), residency (canvas). No network, no eval.
// Everything it draws stands in #data, as columns that series.py wrote; numbers stand in tables.
(() => {
  'use strict';
  const data = JSON.parse(document.getElementById('data').textContent);
  const $ = (selector, root = document) => root.querySelector(selector);
  const undelta = (column) => { let sum = 0; return column.map((step) => (sum += step)); };
  const MICRO = 1e6;
  const END = Math.max(data.end, 1) / MICRO;

  // -- words --------------------------------------------------------------------------------------

  const bytes = (n) => {
    if (n == null) return '';
    let size = n, unit = 'B';
    for (const next of ['KiB', 'MiB', 'GiB', 'TiB', 'PiB', 'EiB']) {
      if (Math.abs(size) < 1024) break;
      size /= 1024; unit = next;
    }
    return `${unit === 'B' ? size : +size.toPrecision(4)} ${unit}`;
  };
  const three = (x) => (Math.abs(x) >= 100 ? x.toFixed(0) : String(+x.toPrecision(3)));
  const seconds = (s) => {
    const size = Math.abs(s);
    if (size >= 1) return `${three(s)} s`;
    if (size >= 1e-3) return `${three(s * 1e3)} ms`;
    return size ? `${three(s * 1e6)} us` : '0 s';
  };
  const rate = (r) => (!r ? '0' : r >= 1e9 ? `${three(r / 1e9)} GB/s` : r >= 1e6 ? `${three(r / 1e6)} MB/s`
    : `${three(r / 1e3)} kB/s`);
  const reasons = Object.entries(data.reasons);
  const reason = (i) => (i < 0 ? 'another reason' : reasons[i][1]);
  const code = (i) => (i < 0 ? '' : reasons[i][0]);
  const colour = (name) => getComputedStyle(document.documentElement)
    .getPropertyValue(`--${name}`).trim();

  // -- one part of the time for all charts --------------------------------------------------------

  const range = { min: 0, max: END };
  const followers = [];
  let following = false;
  function show(min, max) {
    if (following) return;
    const length = Math.min(END, Math.max(max - min, 2e-6));
    range.min = Math.min(Math.max(0, min), END - length);
    range.max = range.min + length;
    following = true;
    for (const follow of followers) follow();
    following = false;
    $('#range').textContent = `${seconds(range.min)} to ${seconds(range.max)}`;
  }
  const zoom = (factor, middle = (range.min + range.max) / 2) => {
    const half = ((range.max - range.min) / 2) * factor;
    show(middle - half, middle + half);
  };
  const pan = (share) => {
    const by = (range.max - range.min) * share;
    show(range.min + by, range.max + by);
  };
  const steps = { begin: undelta(data.steps.begin), end: undelta(data.steps.end),
    number: undelta(data.steps.number) };
  const phases = { ...data.phases, begin: undelta(data.phases.begin), end: undelta(data.phases.end) };
  function showStep(by) {
    const middle = ((range.min + range.max) / 2) * MICRO;
    let here = steps.end.findIndex((end) => end > middle);
    if (here < 0) here = steps.end.length - 1;
    if (range.max - range.min < END * 0.999) here += by;
    here = Math.min(Math.max(here, 0), steps.end.length - 1);
    if (here >= 0) show(steps.begin[here] / MICRO, steps.end[here] / MICRO);
  }
  const zooms = {
    all: () => show(0, END),
    typical: () => show(data.typical[0] / MICRO, data.typical[1] / MICRO),
    before: () => showStep(-1),
    after: () => showStep(1),
    closer: () => zoom(0.5),
    wider: () => zoom(2),
  };
  const tip = $('.tip');
  function point(text, x, y) { // a tooltip near a place on the screen; no text hides it
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${Math.max(4, Math.min(y + 16, innerHeight - tip.offsetHeight - 8))}px`;
  }

  // wheel and two fingers over a picture; ``place`` has the focus when the wheel is its own
  function zoomable(area, place, timeAt) {
    area.addEventListener('wheel', (event) => {
      const asked = event.ctrlKey || event.metaKey || place.contains(document.activeElement);
      if (!asked) return; // the wheel scrolls the page
      event.preventDefault();
      const across = event.shiftKey ? event.deltaY : event.deltaX;
      if (Math.abs(across) > Math.abs(event.shiftKey ? 0 : event.deltaY)) pan(across / 1500);
      else zoomAt(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 250))), timeAt(event.clientX));
    }, { passive: false });
    const fingers = new Map();
    const spread = () => { const [a, b] = [...fingers.values()]; return Math.max(8, Math.abs(a - b)); };
    area.addEventListener('pointerdown', (event) => {
      if (event.pointerType === 'touch') fingers.set(event.pointerId, event.clientX);
    });
    area.addEventListener('pointermove', (event) => {
      if (!fingers.has(event.pointerId)) return;
      if (fingers.size === 1) pan((fingers.get(event.pointerId) - event.clientX) / area.clientWidth);
      const before = fingers.size === 2 ? spread() : 0;
      fingers.set(event.pointerId, event.clientX);
      const [a, b] = [...fingers.values()];
      if (before) zoomAt(before / spread(), timeAt((a + b) / 2));
    });
    for (const name of ['pointerup', 'pointercancel', 'pointerleave']) {
      area.addEventListener(name, (event) => fingers.delete(event.pointerId));
    }
  }
  const zoomAt = (factor, t) => { // what is at a time stays where it is
    show(t - (t - range.min) * factor, t + (range.max - t) * factor);
  };

  for (const button of document.querySelectorAll('[data-zoom]')) {
    button.addEventListener('click', () => zooms[button.dataset.zoom]());
  }
  const timeKeys = (event) => {
    const act = { '+': () => zoom(0.5), '=': () => zoom(0.5), '-': () => zoom(2),
      0: () => zooms.all() }[event.key];
    if (act) { act(); event.preventDefault(); }
    return Boolean(act);
  };

  // -- timelines and lanes ------------------------------------------------------------------------

  const charts = [], LEFT = innerWidth < 700 ? 84 : 124, RIGHT = 10; // margins that all charts share
  const INCREMENTS = Array.from({ length: 50 }, (_, i) => 2 ** i);
  const axisStyle = () => ({ stroke: colour('soft'), grid: { stroke: colour('grid'), width: 1 },
    ticks: { stroke: colour('grid'), width: 1 }, font: '12px system-ui, sans-serif' });

  function timeTicks(u, ticks, axis, space, apart) { // all in one unit, as exact as they lie apart
    const most = Math.max(...ticks);
    const [unit, name] = most >= 1 ? [1, 's'] : most >= 1e-3 ? [1e-3, 'ms'] : [1e-6, 'us'];
    let digits = 0; // 0.25 s apart takes two: with one they would be at 5.3 s, 5.5 s, 5.8 s
    const odd = (n) => Math.abs(n - Math.round(n)) > 1e-6;
    while (digits < 6 && odd((apart / unit) * 10 ** digits)) digits += 1;
    return ticks.map((t) => `${(t / unit).toFixed(digits)} ${name}`);
  }

  function strip(u) { // phases above the areas, and a line where a step ends
    const { ctx, bbox } = u, thick = 5 * devicePixelRatio;
    const x = (micros) => u.valToPos(micros / MICRO, 'x', true);
    ctx.save();
    ctx.beginPath(); ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height); ctx.clip();
    phases.begin.forEach((begin, i) => {
      const from = x(begin), to = x(phases.end[i]);
      if (to < bbox.left || from > bbox.left + bbox.width) return;
      ctx.fillStyle = colour(`phase-${phases.names[phases.name[i]]}`) || colour('soft');
      ctx.fillRect(from, bbox.top, Math.max(1, to - from), thick);
    });
    ctx.fillStyle = colour('soft');
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`; ctx.textBaseline = 'top';
    if ((range.max - range.min) / END < 200 / steps.end.length) {
      steps.end.forEach((end, i) => {
        const from = Math.max(bbox.left, x(steps.begin[i]));
        const to = Math.min(bbox.left + bbox.width, x(end));
        ctx.globalAlpha = 0.35; ctx.fillRect(x(end), bbox.top, 1, bbox.height); ctx.globalAlpha = 1;
        const name = `step ${steps.number[i]}`, wide = ctx.measureText(name).width;
        if (to - from > wide + 8) ctx.fillText(name, (from + to - wide) / 2, bbox.top + thick + 2);
      });
    }
    ctx.restore();
  }

  function level(u, value, text, name, dash, side = 'right') { // a line at a value, with its name
    if (!value || value > u.scales.y.max) return;
    const { ctx, bbox } = u, y = Math.round(u.valToPos(value, 'y', true));
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colour(name);
    ctx.setLineDash(dash); ctx.lineWidth = 1.5 * devicePixelRatio;
    ctx.beginPath(); ctx.moveTo(bbox.left, y); ctx.lineTo(bbox.left + bbox.width, y); ctx.stroke();
    ctx.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textAlign = side; ctx.textBaseline = 'bottom';
    const pad = 6 * devicePixelRatio, wide = ctx.measureText(text).width, high = 13 * devicePixelRatio;
    const x = side === 'right' ? bbox.left + bbox.width - pad : bbox.left + pad;
    ctx.globalAlpha = 0.75; ctx.fillStyle = colour('paper');
    ctx.fillRect(side === 'right' ? x - wide - 2 : x - 2, y - high - 1, wide + 4, high);
    ctx.globalAlpha = 1; ctx.fillStyle = colour(name);
    ctx.fillText(text, x, y - 2 * devicePixelRatio);
    ctx.restore();
  }

  function hatch(ctx, paint) { // reserved: there, but nobody was counted to hold it
    const size = 7 * devicePixelRatio, tile = document.createElement('canvas');
    tile.width = tile.height = size;
    const pen = tile.getContext('2d');
    pen.fillStyle = colour('paper'); pen.fillRect(0, 0, size, size);
    pen.strokeStyle = paint; pen.lineWidth = 1.4 * devicePixelRatio;
    pen.beginPath();
    for (const at of [-size, 0, size]) { pen.moveTo(at, size); pen.lineTo(at + size, 0); }
    pen.stroke();
    return ctx.createPattern(tile, 'repeat');
  }

  // a level holds from its point until the next one: the nearest point may be a later one, and the
  // one that holds may have been long before what is shown
  const nearest = (u, series, closest) => closest;
  const holding = (u, series, closest, t) => (u.data[0][closest] > t && closest > 0 ? closest - 1 : closest);
  const moment = (u, t) => {
    if (!u.holds) return t;
    return u.cursor.left >= 0 ? u.posToVal(u.cursor.left, 'x') : Math.min(range.max, Math.max(range.min, t));
  };

  function plot(place, columns, series, height, extra) {
    const options = {
      width: place.clientWidth, height, padding: [8, RIGHT, 0, 0],
      scales: { x: { time: false, min: range.min, max: range.max }, y: extra.y },
      axes: [{ ...axisStyle(), values: timeTicks, space: 90 }, { ...axisStyle(), size: LEFT, ...extra.axis }],
      series: [{ label: 'at', value: (u, t) => (t == null ? '' : seconds(moment(u, t))) }, ...series],
      legend: { markers: { width: 0, fill: (u, i) => series[i - 1]?.stroke?.(u) ?? '' } },
      cursor: { dataIdx: extra.holds ? holding : nearest, sync: { key: 'time' }, drag: { x: true, y: false }, points: { show: false },
        bind: { dblclick: () => () => zooms.all() } },
      hooks: { draw: extra.draw, setCursor: [rest, tell], setScale: [(u, key) => {
        if (key === 'x' && u.ready) show(u.scales.x.min, u.scales.x.max);
      }], ready: [(u) => { u.ready = true; }] },
    };
    for (const old of place.querySelectorAll('.uplot')) old.remove(); // the still one is for paper
    const chart = new uPlot(options, columns, place);
    chart.ready = true;
    chart.holds = extra.holds;
    zoomable(chart.over, place, (x) => chart.posToVal(x - chart.over.getBoundingClientRect().left, 'x'));
    chart.over.addEventListener('pointerleave', () => point(''));
    charts.push({ chart, place });
    return chart;
  }

  function drawTier(tier, place) {
    const times = undelta(tier.t).map((t) => t / MICRO);
    const raw = tier.v.map(undelta);
    times.push(Math.max(END, times[times.length - 1]));
    for (const column of raw) column.push(column[column.length - 1]);
    let below = new Array(times.length).fill(0);
    const tops = raw.map((column) => (below = column.map((value, i) => value + below[i])));
    const order = raw.map((_, i) => i).reverse(); // the highest first: lower ones paint over it
    const series = order.map((i) => {
      const paint = () => colour(`cat-${tier.tier}-${i}`);
      const held = !tier.categories[i].endsWith(' reserved');
      return { label: tier.categories[i], width: 0, stroke: paint,
        fill: (u) => (held ? paint() : hatch(u.ctx, paint())),
        paths: uPlot.paths.stepped({ align: 1 }), points: { show: false },
        value: (u, _, s, at) => (at == null ? '' : bytes(raw[i][at])) };
    });
    const top = tier.budget && tier.budget < 4 * tier.peak ? Math.max(tier.budget, tier.peak)
      : tier.peak;
    const chart = plot(place, [times, ...order.map((i) => tops[i])], series, 240, {
      holds: true,
      y: { range: [0, top * 1.2 || 1] }, // names of steps stand above the highest line's
      axis: { incrs: INCREMENTS, values: (u, ticks) => ticks.map(bytes), space: 34 },
      draw: [strip,
        (u) => level(u, tier.budget, `budget ${bytes(tier.budget)}`, 'bad', [6, 4]),
        (u) => level(u, tier.peak, `peak ${bytes(tier.peak)}`, 'ink', [1, 3], 'left')],
    });
    chart.whole = true;
  }

  function drawValue(curve, place) {
    const times = undelta(curve.t).map((t) => t / MICRO);
    const chart = plot(place, [times, curve.v], [{ label: curve.name, stroke: () => colour('ink'), width: 1.5,
      points: { show: times.length < 60 },
      value: (u, v) => (v == null ? '' : String(+v.toPrecision(5))) }], 130, {
      y: { range: (u, low, high) => { // a rate from 0; of another value its changes are looked at
        const from = curve.name.endsWith('/s') ? Math.min(0, low) : low;
        const room = high - from || Math.abs(high) || 1;
        return [from === low ? low - room * 0.1 : from, high + room * 0.4];
      } },
      axis: { space: 24 }, draw: [strip],
    });
    chart.lastShown = true;
  }

  function binned({ begin, width, bytes: moved, busy }) { // times, rates, busy shares
    const sizes = undelta(moved), times = undelta(busy);
    const at = sizes.map((_, i) => (begin + i * width) / MICRO);
    const rates = sizes.map((size) => (size / width) * MICRO);
    const end = (begin + sizes.length * width) / MICRO;
    return [[...at, end], [...rates, 0], [...times.map((time) => time / width), 0]];
  }

  function drawLane(lane, place) {
    const sets = lane.bins.map(binned); // of the run, and finer ones of the typical step
    const paint = `lane-${lane.lane}`;
    const chart = plot(place, sets[0].slice(0, 2), [{ label: 'rate', stroke: () => colour(paint), width: 1,
      fill: () => `${colour(paint)}88`, paths: uPlot.paths.stepped({ align: 1 }),
      points: { show: false },
      value: (u, r, s, at) => (at == null ? ''
        : `${rate(r)}, busy ${Math.round(u.busy[at] * 100)} % of the time`) }], 130, {
      holds: true,
      y: { range: (u) => [0, Math.max(...u.data[1], lane.ceiling || 0) * 1.15 || 1] },
      axis: { values: (u, ticks) => ticks.map(rate), space: 24 },
      draw: [(u) => level(u, lane.ceiling, `measured ceiling ${rate(lane.ceiling || 0)}`, 'bad',
        [6, 4])],
    });
    chart.choose = () => {
      const set = sets[1] && range.min >= sets[1][0][0] - 1e-6 && range.max <= sets[1][0].at(-1) + 1e-6
        ? sets[1] : sets[0];
      if (chart.busy === set[2]) return;
      chart.busy = set[2];
      chart.setData(set.slice(0, 2), false);
    };
    chart.whole = true;
  }

  function drawCharts() {
    charts.length = 0;
    for (const tier of data.tiers) drawTier(tier, $(`[data-tier="${tier.tier}"]`));
    for (const curve of data.values) drawValue(curve, $(`[data-value="${CSS.escape(curve.name)}"]`));
    for (const lane of data.lanes) drawLane(lane, $(`[data-lane="${lane.lane}"]`));
  }
  followers.push(() => {
    for (const { chart } of charts) {
      chart.choose?.();
      chart.setScale('x', { min: range.min, max: range.max });
      rest(chart);
    }
  });
  function rest(chart) { // where nobody points, the legend tells of the highest that is shown
    if (!(chart.whole || chart.lastShown) || chart.cursor.left >= 0) return;
    const [times, top] = chart.data;
    let best = -1;
    for (let i = 0; i < times.length && times[i] <= range.max; i += 1) {
      const shown = i + 1 >= times.length || times[i + 1] > range.min;
      if (shown && (best < 0 || chart.lastShown || top[i] > top[best])) best = i;
    }
    if (best >= 0) chart.setLegend({ idx: best });
  }
  function tell(chart) { // at the pointer, or where the keyboard has moved the cursor
    const place = chart.root.parentElement, { idxs: [, idx], left } = chart.cursor;
    const here = chart.over.matches(':hover') || place === document.activeElement;
    if (!here) return;
    if (idx == null || left < 0) { point(''); return; }
    const rows = chart.series.slice(1).map((each, i) => [each.label,
      each.value(chart, chart.data[i + 1][idx], i + 1, idx)]);
    const held = rows.filter(([, value]) => value && value !== '0 B');
    const said = held.length || !rows.some(([, value]) => value) ? held : [['all', '0 B']];
    const spot = chart.over.getBoundingClientRect();
    point([when(moment(chart, chart.data[0][idx]) * MICRO), ...said.map((row) => row.join(': '))].join('\n'),
      spot.left + left, spot.top + Math.max(0, chart.cursor.top));
  }
  for (const place of document.querySelectorAll('.chart')) {
    place.addEventListener('keydown', (event) => {
      if (timeKeys(event)) return;
      const found = charts.find((each) => each.place === place);
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!found || !by) return;
      event.preventDefault();
      if (event.shiftKey) { pan(by / 4); return; }
      const { chart } = found, times = chart.data[0];
      const idx = Math.min(Math.max((chart.cursor.idx ?? 0) + by, 0), times.length - 1);
      if (times[idx] < range.min || times[idx] > range.max) pan(by / 2);
      chart.setCursor({ left: chart.valToPos(times[idx], 'x') + 0.01, top: 10 });
    });
  }

  // -- residency ----------------------------------------------------------------------------------

  const ROW = 20, HEAD = 40;
  const gantt = { box: $('.gantt'), row: 0, stay: -1, ...decodeGantt() };
  const all = { buckets: gantt.buckets, rows: gantt.rows };

  function decodeGantt() {
    const { stays, uses, buckets } = data.gantt;
    const begin = undelta(stays.begin), sizes = undelta(stays.bytes), step = undelta(stays.step);
    const rows = buckets.map(() => ({ stays: [], uses: [] }));
    begin.forEach((t, i) => rows[stays.row[i]].stays.push({ begin: t, ready: t + stays.ready[i],
      end: t + stays.length[i], why: stays.in[i], out: stays.out[i], bytes: sizes[i],
      uses: stays.uses[i], waited: stays.waited[i], slack: stays.slack[i], step: step[i] }));
    const units = new Map();
    buckets.forEach((bucket, i) => {
      units.set(bucket.unit, [...(units.get(bucket.unit) || []), rows[i].uses]);
    });
    undelta(uses.begin).forEach((t, i) => {
      for (const list of units.get(uses.unit[i])) list.push([t, t + uses.length[i]]);
    });
    return { buckets, rows };
  }

  const missed = (stay) => !['plan', 'before'].includes(code(stay.why));
  const lastAbove = (list, value, key) => { // how many of a sorted list begin before a value
    let low = 0, high = list.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (key(list[middle]) < value) low = middle + 1; else high = middle;
    }
    return low;
  };

  function drawGantt() {
    const { box, rows, buckets } = gantt;
    if (!box) return;
    box.scrollTop = Math.min(box.scrollTop, Math.max(0, rows.length * ROW));
    const canvas = $('canvas', box), ratio = devicePixelRatio;
    const wide = box.clientWidth, high = Math.min(560, HEAD + rows.length * ROW + 4);
    $('.pad', box).style.height = `${Math.max(0, rows.length * ROW + HEAD + 4 - high)}px`;
    canvas.style.height = `${high}px`;
    if (canvas.width !== wide * ratio || canvas.height !== high * ratio) {
      canvas.width = wide * ratio; canvas.height = high * ratio;
    }
    const pen = canvas.getContext('2d');
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.fillStyle = colour('paper'); pen.fillRect(0, 0, wide, high);
    const paints = { ink: colour('ink'), soft: colour('soft'), grid: colour('grid'),
      in: colour('stay'), ahead: colour('ahead'), miss: colour('miss'), focus: colour('focus') };
    const flight = { ahead: hatch(pen, paints.ahead), miss: hatch(pen, paints.miss) };
    const scale = (wide - LEFT - RIGHT) / ((range.max - range.min) * MICRO);
    const x = (micros) => LEFT + (micros - range.min * MICRO) * scale;
    const first = Math.floor(box.scrollTop / ROW);
    const last = Math.min(rows.length, first + Math.ceil(high / ROW) + 1);
    pen.font = '12px system-ui, sans-serif'; pen.textBaseline = 'middle';
    for (let i = first; i < last; i += 1) {
      const y = HEAD + i * ROW - box.scrollTop;
      pen.save();
      pen.beginPath(); pen.rect(LEFT, 0, wide - LEFT - RIGHT, high); pen.clip();
      drawRow(pen, rows[i], y, x, wide, paints, flight);
      pen.restore();
      pen.fillStyle = colour('paper'); pen.fillRect(0, y, LEFT - 4, ROW);
      pen.fillStyle = i === gantt.row ? paints.focus : paints.ink;
      pen.fillText(fitted(pen, buckets[i].name, LEFT - 16), 8, y + ROW / 2);
    }
    const chosen = rows[gantt.row]?.stays[gantt.stay];
    if (chosen && chosen.end >= range.min * MICRO && chosen.begin <= range.max * MICRO) {
      pen.strokeStyle = paints.focus; pen.lineWidth = 2.5;
      const from = Math.max(LEFT, x(chosen.begin)), to = Math.min(wide, x(chosen.end));
      pen.strokeRect(from, HEAD + gantt.row * ROW - box.scrollTop + 2, Math.max(4, to - from), ROW - 4);
    }
    drawGanttAxis(pen, x, wide, paints);
  }

  function fitted(pen, name, width) { // the end of a long name tells more than its begin
    if (pen.measureText(name).width <= width) return name;
    let tail = name;
    while (tail.length > 1 && pen.measureText(`\u2026${tail}`).width > width) tail = tail.slice(1);
    return `\u2026${tail}`;
  }

  function drawRow(pen, row, y, x, wide, paints, flight) {
    pen.fillStyle = paints.grid; pen.fillRect(LEFT, y + ROW - 1, wide - LEFT, 1);
    const from = range.min * MICRO, to = range.max * MICRO;
    for (const stay of row.stays) {
      if (stay.end < from) continue;
      if (stay.begin > to) break;
      const left = Math.max(LEFT, x(stay.begin)), right = Math.max(x(stay.end), left + 1);
      const ready = Math.min(right, Math.max(left, x(stay.ready)));
      pen.fillStyle = paints.in; pen.fillRect(ready, y + 4, right - ready, ROW - 8);
      pen.fillStyle = missed(stay) ? flight.miss : flight.ahead;
      pen.fillRect(left, y + 4, ready - left, ROW - 8);
      if (code(stay.why) !== 'before') {
        pen.fillStyle = missed(stay) ? paints.miss : paints.ahead;
        pen.fillRect(left, y + 2, 3, ROW - 4);
      }
    }
    pen.fillStyle = paints.ink;
    for (const [begin, end] of row.uses) {
      if (end < from) continue;
      if (begin > to) break;
      const left = Math.max(LEFT, x(begin));
      pen.fillRect(left, y + ROW / 2 - 2, Math.max(1, x(end) - left), 4);
    }
  }

  function drawGanttAxis(pen, x, wide, paints) {
    pen.fillStyle = colour('paper'); pen.fillRect(0, 0, wide, HEAD - 4);
    pen.fillStyle = paints.soft;
    pen.fillText('unit', 8, HEAD / 2 - 1);
    phases.begin.forEach((begin, i) => {
      const from = Math.max(LEFT, x(begin)), to = Math.min(wide - RIGHT, x(phases.end[i]));
      if (to <= from) return;
      const name = phases.names[phases.name[i]];
      pen.fillStyle = colour(`phase-${name}`) || paints.soft;
      pen.fillRect(from, HEAD - 8, Math.max(1, to - from), 4);
      if (to - from > 60) { pen.fillStyle = paints.soft; pen.fillText(name, from + 2, HEAD - 16); }
    });
    const length = range.max - range.min, most = Math.max(2, (wide - LEFT - RIGHT) / 100);
    const power = 10 ** Math.floor(Math.log10(length / most));
    const apart = [1, 2, 5, 10].map((by) => by * power).find((by) => length / by <= most) || power * 10;
    const ticks = [];
    for (let t = Math.ceil(range.min / apart) * apart; t <= range.max; t += apart) ticks.push(t);
    pen.fillStyle = paints.soft;
    timeTicks(null, ticks, 0, 0, apart).forEach((text, i) => {
      const at = x(ticks[i] * MICRO);
      pen.fillRect(at, 2, 1, 6);
      if (at + pen.measureText(text).width + 6 < wide) pen.fillText(text, at + 4, 8);
    });
  }

  const when = (micros) => {
    const step = steps.begin.findIndex((begin, i) => begin <= micros && micros < steps.end[i]);
    const phase = phases.begin.findIndex((begin, i) => begin <= micros && micros < phases.end[i]);
    return [seconds(micros / MICRO), step < 0 ? 'outside steps' : `step ${steps.number[step]}`,
      phase < 0 ? 'between' : phases.names[phases.name[phase]]].join(', ');
  };
  function came(stay) {
    const arrived = stay.ready > stay.begin ? `, arrived after ${seconds((stay.ready - stay.begin) / MICRO)}` : '';
    const waited = stay.waited ? `; training waited ${seconds(stay.waited / MICRO)} for it` : '';
    let early = '';
    if (code(stay.why) === 'plan' && stay.slack != null) {
      early = stay.slack < 0 ? `, ${seconds(-stay.slack / MICRO)} after its use began`
        : `, ${seconds(stay.slack / MICRO)} before its first use`;
    }
    return `${reason(stay.why)} [${code(stay.why)}], ${bytes(stay.bytes)}${arrived}${early}${waited}`;
  }
  const went = (stay) => `${reason(stay.out)} [${code(stay.out)}], after `
    + `${seconds((stay.end - stay.begin) / MICRO)} and ${stay.uses} use${stay.uses === 1 ? '' : 's'}`;

  function describe() {
    const bucket = gantt.buckets[gantt.row], stay = gantt.rows[gantt.row].stays[gantt.stay];
    const what = stay ? `came at ${when(stay.begin)}: ${came(stay)}. Went: ${went(stay)}.`
      : `${gantt.rows[gantt.row].stays.length} stays; left and right go through them.`;
    $('#said').textContent = `${bucket.name}: ${what}`;
  }

  function select(row, stay, reveal = true) {
    gantt.row = Math.min(Math.max(row, 0), gantt.rows.length - 1);
    gantt.stay = Math.min(Math.max(stay, -1), gantt.rows[gantt.row].stays.length - 1);
    const { box } = gantt, y = gantt.row * ROW;
    if (reveal && y < box.scrollTop) box.scrollTop = y;
    if (reveal && y + ROW * 2 + HEAD > box.scrollTop + box.clientHeight) {
      box.scrollTop = y + ROW * 2 + HEAD - box.clientHeight;
    }
    const chosen = gantt.rows[gantt.row].stays[gantt.stay];
    if (reveal && chosen && (chosen.end / MICRO < range.min || chosen.begin / MICRO > range.max)) {
      const half = (range.max - range.min) / 2;
      show(chosen.begin / MICRO - half, chosen.begin / MICRO + half);
    }
    describe();
    drawGantt();
  }

  function story(focus) {
    const bucket = gantt.buckets[gantt.row], { stays } = gantt.rows[gantt.row];
    const body = $('#story tbody');
    $('#story h3').textContent = `Life of ${bucket.name} (bucket ${bucket.id}, `
      + `${bytes(bucket.bytes)}, ${bucket.trainable ? 'trainable' : 'frozen'})`;
    const limit = 500;
    body.replaceChildren(...stays.slice(0, limit).map((stay, i) => {
      const row = document.createElement('tr');
      for (const text of [i + 1, when(stay.begin), came(stay), went(stay)]) {
        row.append(Object.assign(document.createElement('td'), { textContent: text }));
      }
      return row;
    }));
    $('#story .soft').textContent = stays.length > limit
      ? `The first ${limit} of ${stays.length} stays.` : '';
    $('#story').hidden = false;
    if (focus) $('#story').focus();
  }

  function hit(event) { // the row and stay under the pointer
    const spot = $('canvas', gantt.box).getBoundingClientRect();
    const row = Math.floor((event.clientY - spot.top - HEAD + gantt.box.scrollTop) / ROW);
    if (row < 0 || row >= gantt.rows.length) return null;
    const share = (event.clientX - spot.left - LEFT) / (spot.width - LEFT - RIGHT);
    const t = (range.min + share * (range.max - range.min)) * MICRO;
    const near = (3 / (spot.width - LEFT)) * (range.max - range.min) * MICRO;
    const { stays } = gantt.rows[row];
    const stay = lastAbove(stays, t + near, (each) => each.begin) - 1;
    const there = stay >= 0 && stays[stay].end + near >= t && share >= 0;
    return { row, stay: there ? stay : -1, t: t / MICRO };
  }

  function connectGantt() {
    const { box } = gantt;
    if (!box) return;
    const canvas = $('canvas', box);
    let from = null;
    zoomable(canvas, box, (x) => {
      const spot = canvas.getBoundingClientRect();
      return range.min + ((x - spot.left - LEFT) / (spot.width - LEFT - RIGHT)) * (range.max - range.min);
    });
    box.addEventListener('scroll', drawGantt);
    canvas.addEventListener('pointermove', (event) => {
      const found = hit(event);
      if (!found) { point(''); return; }
      const { name } = gantt.buckets[found.row], stay = gantt.rows[found.row].stays[found.stay];
      const text = stay ? `${name}, ${when(stay.begin)}\n${came(stay)}\n${went(stay)}`
        : `${name}, ${when(found.t * MICRO)}: not on HBM`;
      point(text, event.clientX, event.clientY);
    });
    canvas.addEventListener('pointerleave', () => point(''));
    canvas.addEventListener('pointerdown', (event) => { from = hit(event); });
    canvas.addEventListener('pointerup', (event) => {
      const to = hit(event);
      if (!from || !to) return;
      if (Math.abs(to.t - from.t) > (range.max - range.min) / 60) {
        show(Math.min(from.t, to.t), Math.max(from.t, to.t));
      } else if (to.stay >= 0) {
        select(to.row, to.stay, false); story(false);
        $('#story').scrollIntoView({ block: 'nearest' });
      } else select(to.row, -1, false);
      from = null;
    });
    canvas.addEventListener('dblclick', zooms.all);
    box.addEventListener('focus', () => { describe(); drawGantt(); });
    box.addEventListener('keydown', (event) => {
      if (timeKeys(event)) return;
      const { row, stay, rows } = gantt;
      const act = {
        ArrowDown: () => select(row + 1, -1), ArrowUp: () => select(row - 1, -1),
        ArrowRight: () => select(row, stay + 1), ArrowLeft: () => select(row, Math.max(0, stay - 1)),
        Home: () => select(row, 0), End: () => select(row, rows[row].stays.length - 1),
        PageDown: () => select(row + 10, -1), PageUp: () => select(row - 10, -1),
        Enter: () => story(true), ' ': () => story(true),
      }[event.key];
      if (act) { act(); event.preventDefault(); }
    });
    $('#story').addEventListener('keydown', (event) => {
      if (event.key === 'Escape') { $('#story').hidden = true; box.focus(); }
    });
    $('#story button').addEventListener('click', () => { $('#story').hidden = true; box.focus(); });
    followers.push(drawGantt);
  }

  // -- search -------------------------------------------------------------------------------------

  const find = $('#find');
  function search() { // a unit by its name, or by that of a parameter in it
    const asked = find.value.trim().toLowerCase();
    const has = (bucket) => !asked || bucket.name.toLowerCase().includes(asked)
      || bucket.params.some((name) => `${bucket.name}.${name}`.toLowerCase().includes(asked));
    const kept = all.buckets.map((bucket, i) => i).filter((i) => has(all.buckets[i]));
    gantt.buckets = kept.map((i) => all.buckets[i]);
    gantt.rows = kept.map((i) => all.rows[i]);
    gantt.row = 0; gantt.stay = -1;
    const units = new Set(gantt.buckets.map((bucket) => bucket.name.toLowerCase()));
    let seen = 0;
    const matches = (text) => !asked || text.includes(asked)
      || units.has(text.replace(/ \(\d+\)$/, ''));
    for (const row of document.querySelectorAll('#residency tbody tr, #peak tbody tr:not(.sum)')) {
      const cells = row.querySelectorAll('th, .found');
      const texts = cells.length ? [...cells] : [row];
      row.hidden = !texts.some((cell) => matches(cell.textContent.toLowerCase()));
      seen += !row.hidden;
    }
    for (const cell of document.querySelectorAll('.treemap > svg')) {
      cell.setAttribute('opacity', matches($('title', cell).textContent.toLowerCase().split(':')[0]) ? 1 : 0.2);
    }
    $('#found').textContent = asked ? `${gantt.buckets.length} of ${all.buckets.length} buckets, ${seen} rows` : '';
    if (gantt.box) drawGantt();
  }
  find?.addEventListener('input', search);
  find?.addEventListener('keydown', (event) => {
    if (event.key === 'Escape') { find.value = ''; search(); }
    if (event.key === 'Enter' && gantt.box) { gantt.box.focus(); gantt.box.scrollIntoView({ block: 'center' }); }
  });

  // -- the bar on top -----------------------------------------------------------------------------

  const nav = $('nav');
  new ResizeObserver(() => { // a view that is gone to begins below it, on one line or on two
    const covers = getComputedStyle(nav).position === 'sticky';
    document.documentElement.style.scrollPaddingTop = covers ? `${nav.offsetHeight + 8}px` : '';
  }).observe(nav);

  // -- begin --------------------------------------------------------------------------------------

  function draw() { drawCharts(); drawGantt(); }
  let drawn = 0;
  addEventListener('resize', () => {
    cancelAnimationFrame(drawn);
    drawn = requestAnimationFrame(draw);
  });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', draw);
  connectGantt();
  requestAnimationFrame(() => setTimeout(() => { // the verdict is on the screen before this
    draw();
    zooms[data.steps.begin.length > 8 && data.typical.length ? 'typical' : 'all']();
    document.body.dataset.ready = 'yes';
  }));
})();
