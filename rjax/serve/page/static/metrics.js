// Prometheus' text format, and rates from its counters.

const LINE = /^([\w:]+)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** The metrics of one scrape. */
export class Scrape {
  #values = new Map();
  #labels = new Map();

  /**
   * @param {string} text
   * @param {number} time of the scrape, in milliseconds
   */
  constructor(text, time) {
    this.time = time;
    for (const line of text.split("\n")) {
      const [, name, labels, value] = LINE.exec(line) ?? [];
      if (!name) continue;
      this.#values.set(name, this.get(name) + Number(value));
      this.#labels.set(name, labels ?? "");
    }
  }

  /** The sum of a metric's series; 0 if there are none. */
  get(name) {
    return this.#values.get(name) ?? 0;
  }

  /** A label of a metric's last series. */
  label(name, label) {
    for (const [, key, value] of (this.#labels.get(name) ?? "").matchAll(LABEL)) {
      if (key === label) return value;
    }
    return undefined;
  }
}

/**
 * What happened between two scrapes.
 * @returns {{time: number, rate: ?number, saved: ?number}} generated tokens per second, and the
 *   share of KV reads that shared prefixes saved; null if unknown
 */
export function between(before, after) {
  const grown = (name) => after.get(name) - before.get(name);
  const seconds = (after.time - before.time) / 1000;
  const generated = grown("rjax:generation_tokens_total");
  const saved = grown("rjax:kv_token_reads_saved_total");
  const read = grown("rjax:kv_tokens_read_total");
  const restarted = generated < 0 || saved < 0 || read < 0; // counters begin at 0 again
  return {
    time: after.time,
    rate: restarted ? null : generated / seconds,
    saved: restarted || saved + read === 0 ? null : saved / (saved + read),
  };
}
