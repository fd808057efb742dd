// The panel's part about the server: live plots, latencies and the memory plan.

import { byId, counted, element, rated, sized } from "./element.js";
import { LivePlot } from "./plot.js";

export class ServerPanel {
  constructor() {
    const place = byId("plots");
    this.rate = new LivePlot(place, "Tokens per second", { format: rated });
    this.pages = new LivePlot(place, "Cache pages in use");
    this.rows = new LivePlot(place, "Rows in the batch");
    this.before = null;
    this.plan = "";
  }

  /** Shows what /stats says. */
  update(stats) {
    this.showPlan(stats.plan);
    if (stats.phase === "starting") return;
    this.gauge(this.pages, stats.now, stats.pages);
    this.gauge(this.rows, stats.now, stats.rows);
    byId("waiting").value = stats.waiting;
    const { before } = this;
    this.before = stats;
    if (!before || stats.now <= before.now) return;
    const [now, then] = [stats.totals, before.totals];
    this.rate.add(stats.now, (now.generated_tokens - then.generated_tokens) / (stats.now - before.now));
    latency("first", now, then, "first_token_seconds", "first_tokens");
    latency("between", now, then, "later_token_seconds", "later_tokens");
  }

  gauge(plot, now, { used, of }) {
    plot.most = of;
    plot.format = (value) => `${counted(value)} of ${counted(of)}`;
    plot.add(now, used);
    plot.top.textContent = counted(of);
  }

  showPlan(items) {
    const shown = JSON.stringify(items);
    if (shown === this.plan) return;
    this.plan = shown;
    byId("plan-section").hidden = items.length === 0;
    const total = items.reduce((sum, { bytes }) => sum + bytes, 0);
    const found = [...items].filter(({ bytes }) => bytes > 0).sort((a, b) => b.bytes - a.bytes);
    byId("plan-total").textContent = sized(total);
    byId("plan-bar").replaceChildren(...found.map(({ bytes }, place) => {
      const part = element("span", { class: `tone-${Math.min(place, 7)}` });
      part.style.flexGrow = bytes / total;
      return part;
    }));
    byId("plan").replaceChildren(...found.map(({ name, bytes, why }, place) => element(
      "tr",
      { title: why },
      element("th", { scope: "row" }, element("span", { class: `dot tone-${Math.min(place, 7)}` }), name),
      element("td", { text: sized(bytes) }),
    )));
  }
}

/** The mean of what came since the last time; it stays where nothing came. */
function latency(id, now, then, seconds, count) {
  const tokens = now[count] - then[count];
  if (tokens > 0) byId(id).value = `${((1000 * (now[seconds] - then[seconds])) / tokens).toFixed(1)} ms`;
}
