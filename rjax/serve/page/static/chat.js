// The conversation. Text of the model and of the server becomes text nodes, never HTML.

import { RequestError } from "./api.js";
import { events } from "./event_stream.js";
import { markdown } from "./markdown.js";

const DRAWN_EVERY = 100; // milliseconds between two drawings of a growing answer

/** A conversation with the model, shown in an element. */
export class Chat {
  #turns = []; // messages of complete turns
  #running = null; // AbortController of the answer in progress

  /**
   * @param {import("./api.js").Api} api
   * @param {HTMLElement} log gets the turns
   */
  constructor(api, log) {
    this.api = api;
    this.log = log;
    this.start = [...log.children];
  }

  /** Abort the answer in progress; its text stays in the conversation. */
  stop() {
    this.#running?.abort();
  }

  /** Start a new conversation. */
  clear() {
    this.stop();
    this.#turns = [];
    this.log.replaceChildren(...this.start);
  }

  /**
   * Ask the next question and show the answer while it is generated.
   * @param {string} question
   * @param {{system: string, temperature?: number, max_tokens?: number}} options
   * @returns {Promise<boolean>} whether the turn became part of the conversation
   */
  async ask(question, { system, ...sampling }) {
    const turns = this.#turns;
    const asked = { role: "user", content: question };
    const messages = [...first(system), ...turns, asked];
    for (const shown of this.start) shown.remove();
    const own = addTurn(this.log, this.log, "user", "You");
    own.append(element("div", "text", question));
    const answer = new Answer(this.log, this.log, "Model");
    const running = (this.#running = new AbortController());
    const answered = await this.#answer({ messages, ...sampling }, answer, running.signal);
    this.#running = null;
    if (answer.refused) own.remove();
    if (answered && answer.content) {
      turns.push(asked, { role: "assistant", content: answer.content });
    }
    return answered;
  }

  /**
   * Ask several questions at once, each on its own, and show the answers side by side.
   * @param {string[]} questions
   * @param {{system: string, temperature?: number, max_tokens?: number}} options
   * @returns {Promise<boolean>} whether all were answered
   */
  async askAll(questions, { system, ...sampling }) {
    for (const shown of this.start) shown.remove();
    const group = element("div", "many");
    this.log.append(group);
    const running = (this.#running = new AbortController());
    const asked = questions.map((question) => {
      const messages = [...first(system), { role: "user", content: question }];
      const answer = new Answer(this.log, group, question);
      return this.#answer({ messages, ...sampling }, answer, running.signal);
    });
    const answered = await Promise.all(asked);
    this.#running = null;
    return answered.every(Boolean);
  }

  /** Stream an answer; returns whether it was answered, or stopped by the user. */
  async #answer(body, answer, signal) {
    try {
      await this.#stream(body, answer, signal);
    } catch (error) {
      if (error.name !== "AbortError") {
        answer.fail(error);
        return false;
      }
      answer.stopped = true;
    } finally {
      answer.finish();
    }
    return true;
  }

  async #stream(body, answer, signal) {
    const stream_options = { include_usage: true, continuous_usage_stats: true };
    const response = await this.api.fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ ...body, stream: true, stream_options }),
      signal,
    });
    for await (const data of events(response)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new RequestError(chunk.error.message, 0);
      answer.add(chunk);
    }
    throw new RequestError("the connection ended before the answer was complete", 0);
  }
}

/** One answer: its text, and its figures from the usage in the chunks. */
class Answer {
  content = "";
  stopped = false;
  refused = false; // for want of a key, which is said beside the key
  #started = performance.now();
  #first = null; // {time, tokens} of the first chunk with tokens
  #last = null;
  #usage = null;
  #reason = null;
  #reasoning = null; // text node
  #text = element("div", "text");
  #drawn = 0;

  /**
   * @param {HTMLElement} log scrolls
   * @param {HTMLElement} parent of the turn
   * @param {string} title of the turn
   */
  constructor(log, parent, title) {
    this.log = log;
    this.turn = addTurn(log, parent, "assistant", title);
    this.turn.setAttribute("aria-busy", "true"); // announced when it is complete
    this.turn.append(this.#text);
  }

  /** Add a chunk of the stream. */
  add(chunk) {
    const atEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
    for (const { delta, finish_reason } of chunk.choices) {
      if (delta.reasoning) this.#addReasoning(delta.reasoning);
      if (delta.content) {
        this.content += delta.content;
        this.#draw(DRAWN_EVERY);
      }
      this.#reason = finish_reason ?? this.#reason;
    }
    if (chunk.usage) {
      this.#usage = chunk.usage;
      const now = { time: performance.now(), tokens: chunk.usage.completion_tokens };
      if (now.tokens > (this.#last?.tokens ?? 0)) {
        this.#first ??= now;
        this.#last = now;
      }
    }
    if (atEnd) this.log.scrollTop = this.log.scrollHeight;
  }

  /** Show an error. */
  fail(error) {
    this.refused = error.status === 401;
    if (this.refused) {
      this.turn.remove();
      return;
    }
    const shown = element("p", "error", error.message);
    shown.setAttribute("role", "alert");
    this.turn.append(shown);
  }

  /** Draw the text, unless that was less than some milliseconds ago. */
  #draw(every) {
    const now = performance.now();
    if (now - this.#drawn < every) return;
    this.#drawn = now;
    this.#text.replaceChildren(markdown(this.content));
  }

  /** Show the figures. */
  finish() {
    this.#draw(0);
    this.turn.removeAttribute("aria-busy");
    const parts = [];
    const usage = this.#usage;
    if (usage) {
      const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
      parts.push(`prompt ${usage.prompt_tokens} tokens, ${cached} cached`);
      parts.push(`answer ${usage.completion_tokens} tokens`);
    }
    if (this.#first) {
      const seconds = (this.#first.time - this.#started) / 1000;
      parts.push(`${this.#rate().toFixed(1)} tokens/s`, `first token after ${seconds.toFixed(2)} s`);
    }
    if (this.#reason === "length") parts.push("cut off: the longest answer is set in Options");
    if (this.stopped) parts.push("stopped");
    if (parts.length) this.turn.append(element("p", "figures", parts.join(" · ")));
    this.log.scrollTop = this.log.scrollHeight;
  }

  /** Tokens per second after the first chunk, or of the whole answer if that is one chunk. */
  #rate() {
    const more = this.#last.tokens - this.#first.tokens;
    if (more) return (1000 * more) / (this.#last.time - this.#first.time);
    return (1000 * this.#last.tokens) / (this.#last.time - this.#started);
  }

  #addReasoning(text) {
    if (!this.#reasoning) {
      this.#reasoning = document.createTextNode("");
      const details = element("details", "reasoning");
      details.open = true;
      const shown = element("div", "text");
      shown.append(this.#reasoning);
      details.append(element("summary", "", "Reasoning"), shown);
      this.turn.insertBefore(details, this.#text);
    }
    this.#reasoning.appendData(text);
  }
}

/** The messages before the conversation. */
function first(system) {
  return system ? [{ role: "system", content: system }] : [];
}

function addTurn(log, parent, kind, name) {
  const turn = element("article", `turn ${kind}`);
  turn.append(element("h3", "", name));
  parent.append(turn);
  log.scrollTop = log.scrollHeight;
  return turn;
}

function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}
