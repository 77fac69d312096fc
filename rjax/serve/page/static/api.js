// Requests to the server that served this page. Paths are relative, so that a proxy may serve the
// page at any path.

/** An error response of the server, or a request that got none. */
export class RequestError extends Error {
  /**
   * @param {string} message for the user
   * @param {number} status HTTP status code; 0 without a response
   */
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** The server's API. The key exists in this object only. */
export class Api {
  #key = "";

  /** @param {(message: string) => void} unauthorized called when the server refuses the key */
  constructor(unauthorized) {
    this.unauthorized = unauthorized;
  }

  /** @param {string} key "" for none */
  setKey(key) {
    this.#key = key;
  }

  /**
   * Fetch a path.
   * @param {string} path
   * @param {RequestInit} options
   * @returns {Promise<Response>} a response with a status below 400
   * @throws {RequestError} any other response, or none
   */
  async fetch(path, options = {}) {
    const response = await this.#send(path, options);
    if (response.ok) return response;
    const message = await errorMessage(response);
    if (response.status === 401) this.unauthorized(message);
    throw new RequestError(message, response.status);
  }

  /**
   * The server's state, from a route that needs no key.
   * @returns {Promise<{status: string, compiled?: number, of?: number}>}
   * @throws {RequestError} there is no response, or it is not the server's
   */
  async health() {
    const response = await this.#send("health", { signal: AbortSignal.timeout(10_000) });
    const found = await response.json().catch(() => null);
    if (typeof found?.status === "string") return found;
    throw new RequestError(`status ${response.status}`, response.status);
  }

  async #send(path, options) {
    const headers = new Headers(options.headers);
    try {
      if (this.#key) headers.set("Authorization", `Bearer ${this.#key}`);
      return await fetch(path, { ...options, headers, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new RequestError(`no answer from the server (${error.message})`, 0);
    }
  }
}

/** The message of an error response, as text. */
async function errorMessage(response) {
  const text = await response.text().catch(() => "");
  try {
    return `${response.status}: ${JSON.parse(text).error.message}`;
  } catch {
    return `${response.status}: ${text.slice(0, 500) || response.statusText}`;
  }
}
