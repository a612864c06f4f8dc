(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const compared = data.runs.length > 1;
  const byId = id => document.getElementById(id);
  const make = (name, className, text) => {
    const element = document.createElement(name);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const seriesColour = number => colour(`--s${number % 8}`);

  // Figures as people read them.
  const digits = (value, count) => {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size < 1e-3 || size >= 1e6) return value.toExponential(Math.max(0, count - 2));
    return String(Number(value.toPrecision(count)));
  };
  const amount = value => {
    for (const [limit, suffix] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
      if (Math.abs(value) >= limit) return digits(value / limit, 4) + suffix;
    }
    return digits(value, 4);
  };
  const duration = seconds => {
    if (seconds < 60) return `${digits(seconds, 3)} s`;
    if (seconds < 3600) return `${digits(seconds / 60, 3)} min`;
    return `${digits(seconds / 3600, 4)} h`;
  };
  const FORMS = {
    number: value => digits(value, 5),
    small: value => (value && Math.abs(value) < 1e-2 ? value.toExponential(2) : digits(value, 4)),
    amount,
    percent: value => `${digits(100 * value, 3)} %`,
    gibibytes: value => `${digits(value, 4)} GiB`,
    milliseconds: value => (value < 1000 ? `${digits(value, 4)} ms` : `${digits(value / 1000, 4)} s`),
  };
  const AXES = {
    step: { title: "steps", text: value => Math.round(value).toLocaleString("en") },
    time: { title: "time of training", text: duration },
    samples: { title: "samples", text: amount },
    tokens: { title: "tokens", text: amount },
  };

  // Places of steps on the chosen axis.
  const place = (run, axis, step) => {
    if (axis === "step") return step;
    const { x, y } = data.runs[run].axes[axis];
    let low = 0, high = x.length - 1;
    if (step <= x[0]) return y[0] * step / x[0];
    if (step >= x[high]) return y[high];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (x[middle] <= step) low = middle; else high = middle;
    }
    return y[low] + (y[high] - y[low]) * (step - x[low]) / (x[high] - x[low]);
  };

  // A running mean that forgets; its start is not drawn towards zero.
  const smoothed = (values, strength) => {
    let sum = 0, weight = 0;
    return values.map(value => {
      sum = sum * strength + value * (1 - strength);
      weight = weight * strength + 1 - strength;
      return sum / weight;
    });
  };

  const settings = { strength: 0, axis: "step", log: false };
  const plots = [];
  let zoom = null, isZooming = false;

  const linesOf = chart => {
    const labels = new Set(chart.series.map(series => series.label));
    return chart.series.flatMap((series, number) => {
      const run = data.runs[series.run];
      const name = compared ? run.name + (labels.size > 1 ? `, ${series.label}` : "") : series.label;
      const second = compared && series.label !== chart.series[0].label;
      const line = {
        name, dashed: second, colour: seriesColour(compared ? series.run : number), isFew: series.x.length < 60,
        x: series.x.map(step => place(series.run, settings.axis, step)), y: series.y,
      };
      if (!settings.strength || series.x.length < 8) return [line];
      const mean = series.mx || series.x;
      return [
        { ...line, isFaint: true, isFew: false },
        { ...line, x: mean.map(step => place(series.run, settings.axis, step)), y: smoothed(series.my || series.y, settings.strength) },
      ];
    });
  };

  const nearest = (values, index) => {
    for (let distance = 0; distance < values.length; distance++) {
      for (const at of [index - distance, index + distance]) {
        if (values[at] !== null && values[at] !== undefined) return at;
      }
    }
    return null;
  };

  const draw = (chart, card) => {
    const lines = linesOf(chart);
    const table = uPlot.join(lines.map(line => [line.x, line.y]));
    const form = FORMS[chart.form];
    const positive = lines.every(line => line.y.every(value => value > 0));
    const isLog = settings.log && positive && chart.form !== "percent";
    const axis = AXES[settings.axis];
    const text = colour("--muted"), grid = colour("--line");
    const holder = card.querySelector(".plot"), legend = card.querySelector(".legend");

    legend.replaceChildren();
    const where = make("span", "where");
    const shown = lines.map(line => {
      const item = make("span");
      const swatch = make("i", "swatch");
      swatch.style.setProperty("--swatch", line.colour);
      const value = make("b");
      item.append(swatch, line.name, value);
      if (!line.isFaint) legend.append(item);
      return value;
    });
    legend.append(where);
    const tell = (plot, index) => {
      lines.forEach((line, number) => {
        const values = plot.data[number + 1];
        const at = nearest(values, index === null ? values.length - 1 : index);
        shown[number].textContent = at === null ? "" : form(values[at]);
      });
      where.textContent = index === null ? "" : `${settings.axis === "step" ? "step" : "at"} ${axis.text(plot.data[0][index])}`;
    };

    const options = {
      width: Math.max(200, holder.clientWidth), height: chart.wide ? 300 : 190, legend: { show: false }, padding: [8, 24, 0, 0],
      cursor: {
        drag: { x: true, y: false },
        points: { size: 7 },
        sync: { key: "steps", scales: ["x", null], filters: { pub: type => type === "mousemove" || type === "mouseleave" } },
      },
      scales: {
        x: { time: false, ...(zoom ? { min: zoom[0], max: zoom[1] } : {}) },
        y: isLog ? { distr: 3 } : chart.zero ? { range: (plot, low, high) => [0, (high || 1) * 1.08] } : {},
      },
      axes: [
        { stroke: text, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "11px system-ui, sans-serif", values: (plot, ticks) => ticks.map(axis.text), size: 30, space: 70 },
        {
          stroke: text, grid: { stroke: grid, width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif",
          values: (plot, ticks) => ticks.map(value => (value === null ? "" : form(value))),
          size: (plot, ticks) => (ticks ? 14 + 6.3 * Math.max(...ticks.map(tick => tick.length)) : 40),
        },
      ],
      series: [{}, ...lines.map(line => ({
        stroke: line.isFaint ? `color-mix(in srgb, ${line.colour} 28%, transparent)` : line.colour,
        width: line.isFaint ? 1 : 1.8, dash: line.dashed ? [5, 4] : undefined, spanGaps: true,
        points: { show: line.isFew, size: 5, fill: line.colour },
      }))],
      hooks: {
        setCursor: [plot => tell(plot, plot.cursor.idx ?? null)],
        setScale: [(plot, key) => {
          if (key === "x" && !isZooming && plot.isReady) zoomAll(plot);
        }],
        draw: [plot => {
          const context = plot.ctx, ratio = uPlot.pxRatio;
          context.save();
          context.strokeStyle = text;
          context.setLineDash([2 * ratio, 4 * ratio]);
          data.runs.forEach((run, number) => run.resumed.forEach(step => {
            const left = Math.round(plot.valToPos(place(number, settings.axis, step), "x", true));
            if (left < plot.bbox.left || left > plot.bbox.left + plot.bbox.width) return;
            context.beginPath();
            context.moveTo(left, plot.bbox.top);
            context.lineTo(left, plot.bbox.top + plot.bbox.height);
            context.stroke();
          }));
          context.restore();
        }],
      },
    };
    const plot = new uPlot(options, table, holder);
    plot.isReady = true;
    tell(plot, null);
    const [first, last] = [lines[0].y[0], lines[0].y.at(-1)];
    holder.setAttribute("aria-label", `${chart.title}: from ${form(first)} to ${form(last)}`);
    return plot;
  };

  const zoomAll = plot => {
    const { min, max } = plot.scales.x;
    const isWhole = min <= plot.data[0][0] && max >= plot.data[0].at(-1);
    zoom = isWhole ? null : [min, max];
    byId("whole").hidden = isWhole;
    isZooming = true;
    for (const other of plots) {
      const ends = isWhole ? [other.plot.data[0][0], other.plot.data[0].at(-1)] : [min, max];
      if (other.plot !== plot) other.plot.setScale("x", { min: ends[0], max: ends[1] });
    }
    queueMicrotask(() => { isZooming = false; });
  };

  const drawAll = () => {
    isZooming = true;
    for (const entry of plots) {
      if (entry.plot) entry.plot.destroy();
      entry.plot = draw(entry.chart, entry.card);
    }
    queueMicrotask(() => { isZooming = false; });
  };

  const moveByKeys = entry => event => {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (!step) return;
    event.preventDefault();
    const { plot } = entry, last = plot.data[0].length - 1;
    const index = Math.min(last, Math.max(0, (plot.cursor.idx ?? (step > 0 ? -1 : last + 1)) + step));
    plot.setCursor({ left: plot.valToPos(plot.data[0][index], "x"), top: plot.over.clientHeight / 2 });
  };

  const openCharts = () => {
    for (const chart of data.charts) {
      const card = make("figure", chart.wide ? "chart wide" : "chart");
      const holder = make("div", "plot");
      holder.tabIndex = 0;
      holder.setAttribute("role", "img");
      card.append(make("h3", "", chart.title), make("div", "legend"), holder);
      byId("charts").append(card);
      const entry = { chart, card, plot: null };
      holder.addEventListener("keydown", moveByKeys(entry));
      plots.push(entry);
    }
    const select = byId("axis");
    for (const [name, axis] of Object.entries(AXES)) {
      if (name === "step" || data.runs.every(run => run.axes[name])) select.append(new Option(axis.title, name));
    }
    select.addEventListener("change", () => { settings.axis = select.value; zoom = null; byId("whole").hidden = true; drawAll(); });
    byId("smoothing").addEventListener("input", event => {
      const value = Number(event.target.value);
      settings.strength = value ? 1 - 10 ** (-2.3 * value / 99) : 0;
      byId("smoothed").textContent = value ? `${value} %` : "off";
      drawAll();
    });
    byId("log").addEventListener("change", event => { settings.log = event.target.checked; drawAll(); });
    byId("whole").addEventListener("click", () => { zoom = null; byId("whole").hidden = true; drawAll(); });
    byId("controls").hidden = false;
    drawAll();
    const sizes = new ResizeObserver(entries => {
      for (const { target } of entries) {
        const entry = plots.find(one => one.card === target.parentElement);
        const width = Math.floor(target.clientWidth);
        if (entry.plot && Math.abs(entry.plot.width - width) > 1) entry.plot.setSize({ width, height: entry.plot.height });
      }
    });
    for (const entry of plots) sizes.observe(entry.card.querySelector(".plot"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
    addEventListener("beforeprint", () => { document.documentElement.dataset.print = ""; drawAll(); });
    addEventListener("afterprint", () => { delete document.documentElement.dataset.print; drawAll(); });
  };

  // Maps of colours: rows of ranks or layers, columns of steps or experts.
  const LABELS = 46;
  const parsed = text => {
    const context = document.createElement("canvas").getContext("2d");
    context.fillStyle = text;
    return [1, 3, 5].map(at => parseInt(context.fillStyle.slice(at, at + 2), 16));
  };
  const between = (one, other, share) => `rgb(${one.map((value, at) => Math.round(value + (other[at] - value) * share)).join(" ")})`;

  const openHeat = map => {
    const box = make("div", "heat"), canvas = make("canvas"), told = make("span"), scale = make("span", "scale");
    const legend = make("div", "legend"), gradient = make("i"), low = make("span"), high = make("span");
    scale.append(low, gradient, high);
    legend.append(told, scale);
    box.append(make("h3", "", map.title), legend, canvas);
    const known = frame => frame.values.flat().filter(value => value !== null);
    const form = FORMS[map.form], all = map.frames.flatMap(known);
    const largest = Math.max(...all), smallest = Math.min(...all);
    const reach = map.relative ? Math.max(0.05, largest - 1, 1 - smallest) : 1;
    let shown = map.frames.length - 1;

    const colours = () => [colour("--s0"), colour("--faint"), colour("--s1")].map(parsed);
    const shade = (value, [blue, plain, orange]) => {
      if (!map.relative) return between(plain, blue, largest > smallest ? 0.12 + 0.88 * (value - smallest) / (largest - smallest) : 0.5);
      const share = Math.min(1, Math.abs(value - 1) / reach);
      return between(plain, value > 1 ? orange : blue, share);
    };
    const place = () => {
      const rows = map.rows.length, columns = map.columns.length;
      const names = Math.min(150, Math.max(LABELS, 8 + 6.2 * Math.max(...map.rows.map(name => name.length))));
      const width = Math.max(220, box.clientWidth - 28), size = Math.max(3, Math.min(22, Math.floor(420 / rows)));
      return { rows, columns, names, width, size, cell: (width - names) / columns, height: rows * size + 20 };
    };
    const draw = () => {
      const { rows, columns, names, width, size, cell, height } = place(), ratio = devicePixelRatio || 1;
      canvas.width = width * ratio;
      canvas.height = height * ratio;
      canvas.style.height = `${height}px`;
      const context = canvas.getContext("2d"), palette = colours();
      context.scale(ratio, ratio);
      const gap = size > 8 && cell > 8 ? 1 : 0;
      map.frames[shown].values.forEach((row, at) => row.forEach((value, column) => {
        if (value === null) return;
        context.fillStyle = shade(value, palette);
        context.fillRect(names + column * cell, at * size, Math.max(1, cell - gap), size - gap);
      }));
      context.fillStyle = colour("--muted");
      context.font = "11px system-ui, sans-serif";
      context.textBaseline = "middle";
      context.textAlign = "right";
      const each = Math.ceil(13 / size);
      for (let row = 0; row < rows; row += each) context.fillText(map.row ? `${map.row} ${map.rows[row]}` : map.rows[row], names - 6, row * size + size / 2, names - 6);
      context.textAlign = "left";
      const step = Math.max(1, Math.ceil(columns * 70 / width));
      for (let column = 0; column < columns; column += step) context.fillText(map.columns[column].toLocaleString("en"), names + column * cell, rows * size + 11);
      const [blue, plain, orange] = palette;
      const stops = map.relative ? [blue, plain, orange] : [plain, blue];
      gradient.style.setProperty("--gradient", `linear-gradient(90deg, ${stops.map(stop => between(stop, stop, 0)).join(", ")})`);
      low.textContent = form(map.relative ? Math.max(0, 1 - reach) : smallest);
      high.textContent = form(map.relative ? 1 + reach : largest);
      tell();
    };
    const tell = (row, column) => {
      const frame = map.frames[shown];
      if (row !== undefined) {
        told.textContent = `${map.row} ${map.rows[row]}, ${map.column} ${map.columns[column].toLocaleString("en")}: ${frame.values[row][column] === null ? "not recorded" : form(frame.values[row][column])}`.trim();
        return;
      }
      const values = known(frame);
      told.textContent = `${frame.label ? `${frame.label}: ` : ""}from ${form(Math.min(...values))} to ${form(Math.max(...values))}`;
    };
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", map.title);
    canvas.addEventListener("mousemove", event => {
      const { names, size, cell, rows, columns } = place();
      const row = Math.floor(event.offsetY / size), column = Math.floor((event.offsetX - names) / cell);
      if (row >= 0 && row < rows && column >= 0 && column < columns) tell(row, column); else tell();
    });
    canvas.addEventListener("mouseleave", () => tell());
    if (map.frames.length > 1) {
      const slider = make("input");
      Object.assign(slider, { type: "range", min: 0, max: shown, value: shown, ariaLabel: "step" });
      slider.addEventListener("input", () => { shown = Number(slider.value); draw(); });
      box.append(slider);
    }
    return { box, draw };
  };

  const openHeats = () => {
    const heats = [];
    for (const holder of document.querySelectorAll("[data-heats]")) {
      for (const map of data.heats[holder.dataset.heats]) {
        const heat = openHeat(map);
        holder.append(heat.box);
        heats.push(heat);
      }
    }
    const drawHeats = () => heats.forEach(heat => heat.draw());
    drawHeats();
    addEventListener("resize", drawHeats);
    addEventListener("beforeprint", drawHeats);
    addEventListener("afterprint", drawHeats);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawHeats);
  };

  // The bar of sections.
  for (const section of document.querySelectorAll("main > section[id]")) {
    const link = make("a", "", section.querySelector("h2").firstChild.textContent.trim());
    link.href = `#${section.id}`;
    document.querySelector("nav").append(link);
  }
  if (data.charts.length) openCharts();
  openHeats();
  if (data.waits) {
    const minutes = Math.floor((Date.now() / 1000 - data.made) / 60);
    if (minutes >= 30) {
      byId("stale").textContent = `This page is ${duration(minutes * 60)} old. If the run still trains, it is renewed: reload it.`;
      byId("stale").hidden = false;
    }
  }
})();
