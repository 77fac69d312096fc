// Server-sent events of a fetch response.

/**
 * The data of each event. Events have one line of data, as this server sends them.
 * @param {Response} response
 * @yields {string}
 */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data: ")) yield line.slice(6).trimEnd();
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
