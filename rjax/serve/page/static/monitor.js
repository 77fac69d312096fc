// The state of the server: health, metrics each second, named prefixes.

import { Graph, WINDOW } from "./graph.js";
import { Scrape, between } from "./metrics.js";

const INTERVAL = 1000; // milliseconds between two polls
const SLOW = 5; // polls between two looks at what rarely changes
const TIMEOUT = 10_000;

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const percent = new Intl.NumberFormat("en", { style: "percent", maximumFractionDigits: 1 });
const find = (id) => document.getElementById(id);

/** Polls the server and shows what it says, while the page is visible. */
export class Monitor {
  #last = null; // Scrape
  #points = [];
  #polls = 0;
  #allowed = true; // false after the key was refused

  /**
   * @param {import("./api.js").Api} api
   * @param {(model: string) => Promise<void>} ready called when the server is ready, maybe often
   */
  constructor(api, ready) {
    this.api = api;
    this.ready = ready;
    const rate = (value) => value.toFixed(1);
    this.rate = new Graph(find("rate-graph"), "Generated tokens per second", rate);
    const saved = "Share of KV reads saved by shared prefixes";
    this.saved = new Graph(find("saved-graph"), saved, (value) => percent.format(value), 1);
  }

  /** Use the API's new key. */
  retry() {
    this.#allowed = true;
    this.#polls = 0;
  }

  /** Ask for nothing that needs a key, until `retry`. */
  pause() {
    this.#allowed = false;
  }

  /** Poll for as long as the page is open. */
  async run() {
    for (;;) {
      if (!document.hidden) await this.#poll();
      await new Promise((resolve) => setTimeout(resolve, INTERVAL));
    }
  }

  async #poll() {
    const status = await this.#health();
    if (!this.#allowed || status === null) return;
    const signal = AbortSignal.timeout(TIMEOUT);
    const slow = this.#polls++ % SLOW === 0;
    try {
      if (slow) await this.#model(signal);
      if (status === "starting") return; // other requests wait until the server is ready
      const text = await (await this.api.fetch("metrics", { signal })).text();
      this.#measure(new Scrape(text, performance.now()));
      if (slow) await this.#prefixes(signal);
      await this.ready(find("model").textContent);
      showError("");
    } catch (error) {
      showError(error.status === 401 ? "" : error.message); // said beside the key
    }
  }

  /** Show the server's health and return its status, or null without an answer. */
  async #health() {
    let health = { status: null };
    let text;
    try {
      health = await this.api.health();
      text = health.status;
      if (health.of) text += `, ${health.compiled} of ${health.of} programs compiled`;
    } catch (error) {
      text = error.message;
    }
    setText(find("status"), text);
    const bar = find("compiled");
    bar.hidden = !health.of;
    if (health.of) {
      bar.max = health.of;
      bar.value = health.compiled;
    }
    return health.status;
  }

  async #model(signal) {
    const { data } = await (await this.api.fetch("v1/models", { signal })).json();
    setText(find("model"), data[0].id);
  }

  #measure(scrape) {
    if (this.#last) this.#points.push(between(this.#last, scrape));
    this.#last = scrape;
    const now = scrape.time;
    this.#points = this.#points.filter((point) => point.time > now - WINDOW);
    this.rate.draw(this.#points.map(({ time, rate }) => ({ time, value: rate })), now);
    this.saved.draw(this.#points.map(({ time, saved }) => ({ time, value: saved })), now);
    const running = scrape.get("rjax:num_requests_running");
    const waiting = scrape.get("rjax:num_requests_waiting");
    setText(find("sequences"), `${running} sequences running, ${waiting} waiting`);
    showPool(scrape);
  }

  async #prefixes(signal) {
    const { data } = await (await this.api.fetch("v1/prefixes", { signal })).json();
    find("prefixes").hidden = data.length === 0;
    find("no-prefixes").hidden = data.length > 0;
    const rows = data.map(({ name, num_tokens, pinned }) => {
      const row = document.createElement("tr");
      for (const text of [name, whole.format(num_tokens), pinned ? "yes" : "no"]) {
        row.insertCell().textContent = text;
      }
      return row;
    });
    find("prefixes").tBodies[0].replaceChildren(...rows);
  }
}

/** Show how much of the KV pool is pinned, used and cached. */
function showPool(scrape) {
  const total = scrape.get("rjax:kv_bytes_total") || 1;
  const label = (name) => Number(scrape.label("rjax:cache_config_info", name));
  const tokens = label("num_gpu_blocks") * label("block_size");
  const pinned = scrape.get("rjax:kv_bytes_pinned") / total;
  const shares = {
    pinned,
    used: scrape.get("rjax:kv_bytes_used") / total - pinned,
    cached: scrape.get("rjax:kv_bytes_cached") / total,
  };
  let left = 0;
  for (const [name, share] of Object.entries(shares)) {
    const bar = find("pool").querySelector(`.${name}`);
    bar.setAttribute("x", 240 * left);
    bar.setAttribute("width", 240 * share);
    left += share;
    setText(find(`pool-${name}`), `${whole.format(share * tokens)} tokens, ${percent.format(share)}`);
  }
  const looked = scrape.get("rjax:prefix_cache_queries_total");
  const hits = scrape.get("rjax:prefix_cache_hits_total");
  setText(find("hit-rate"), looked ? percent.format(hits / looked) : "-");
}

function showError(message) {
  const shown = find("metrics-error");
  shown.hidden = !message;
  setText(shown, message);
}

/** Set an element's text; an unchanged text is not announced again. */
function setText(shown, text) {
  if (shown.textContent !== text) shown.textContent = text;
}
