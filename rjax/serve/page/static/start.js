// What the page shows before the first question: what this model answers, and the server's API.

const EXAMPLES = 3; // questions to click

/** The empty conversation. */
export class Start {
  #demo = null; // {system_prompt, questions}, both empty unless the model is the bundled one
  #model = "";

  /**
   * @param {import("./api.js").Api} api
   * @param {HTMLElement} shown holds the texts
   * @param {(question: string) => void} ask called with a question that was clicked
   * @param {(text: string) => void} system called with the system prompt of the questions
   */
  constructor(api, shown, ask, system) {
    this.api = api;
    this.shown = shown;
    this.ask = ask;
    this.system = system;
  }

  /** Questions that belong together, for asking them at once; none if the model has no own ones. */
  get questions() {
    return this.#demo?.questions ?? [];
  }

  /**
   * Ask the server, once, what to show.
   * @param {string} model its name
   */
  async load(model) {
    if (this.#demo || !model) return;
    this.#model = model;
    const response = await this.api.fetch("page/demo");
    this.#demo = await response.json();
    if (this.#demo.questions.length) {
      this.#showQuestions();
      this.system(this.#demo.system_prompt);
    }
    this.#showApi();
  }

  #showQuestions() {
    const list = this.shown.querySelector(".questions");
    const buttons = this.#demo.questions.slice(0, EXAMPLES).map((question) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = question;
      button.addEventListener("click", () => this.ask(question));
      return button;
    });
    list.replaceChildren(...buttons);
    this.shown.querySelector(".demo").hidden = false;
    this.shown.querySelector(".hint").hidden = true;
  }

  #showApi() {
    const base = new URL("v1", document.baseURI).href;
    const body = { model: this.#model, messages: [{ role: "user", content: "Hello" }] };
    const [curl, python] = this.shown.querySelectorAll("pre code");
    curl.textContent = [
      `curl ${base}/chat/completions \\`,
      "  -H 'Content-Type: application/json' \\",
      `  -d '${JSON.stringify(body).replaceAll("'", "'\\''")}'`,
    ].join("\n");
    python.textContent = [
      "from openai import OpenAI",
      "",
      `client = OpenAI(base_url=${JSON.stringify(base)}, api_key="KEY")`,
      `messages = ${JSON.stringify(body.messages)}`,
      `answer = client.chat.completions.create(model=${JSON.stringify(this.#model)}, messages=messages)`,
      "print(answer.choices[0].message.content)",
    ].join("\n");
    this.shown.querySelector(".api").hidden = false;
  }
}
