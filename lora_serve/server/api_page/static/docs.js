// Shows /openapi.json, with a key where it needs one. The key is kept in this tab alone, under the
// name that the page at /ui keeps it under.

const STORED = "lora-serve.key";
const ask = document.getElementById("ask");
const told = document.getElementById("told");

function authorization() {
  const key = sessionStorage.getItem(STORED);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** The server's own words for a refusal. */
async function refusal(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered with ${response.status}.`;
  }
}

async function show() {
  const response = await fetch("openapi.json", { headers: authorization() });
  ask.hidden = response.status !== 401;
  told.textContent = response.ok ? "" : await refusal(response);
  if (!response.ok) return;
  SwaggerUIBundle({
    spec: await response.json(),
    dom_id: "#api",
    deepLinking: true,
    requestInterceptor(request) {
      const isOurs = new URL(request.url, location).origin === location.origin;
      if (isOurs) request.headers = { ...authorization(), ...request.headers };
      return request;
    },
  });
}

ask.addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(STORED, document.getElementById("key").value);
  show();
});

show().catch((error) => {
  told.textContent = `The API cannot be shown: ${error.message}`;
});
