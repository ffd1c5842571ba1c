// The paths of Anthropic's client for Node.
import Anthropic, { NotFoundError } from "@anthropic-ai/sdk";
import { ADAPTER, KEY, MODEL, QUESTION, SERVER, WEATHER, check, checkWeather, run } from "./client_paths.mjs";

const client = new Anthropic({ baseURL: SERVER, apiKey: KEY, maxRetries: 0 });
const messages = [{ role: "user", content: QUESTION }];
const asked = { model: MODEL, messages, max_tokens: 16 };
const tools = [{ name: "weather", description: "Tell the weather.", input_schema: WEATHER }];
const one = { type: "any", disable_parallel_tool_use: true };
const withTools = { ...asked, max_tokens: 192, tools };

await run({
  async messages() {
    const answer = await client.messages.create(asked);
    check(answer.content[0].text && answer.usage.output_tokens <= 16, answer);
  },
  async stream_messages() {
    const answer = await client.messages.stream(asked).finalMessage();
    check(answer.content[0].text, answer);
  },
  async adapter() {
    const answer = await client.messages.create({ ...asked, model: ADAPTER });
    check(answer.model === ADAPTER, answer);
  },
  async tools() {
    const answer = await client.messages.create({ ...withTools, tool_choice: one });
    checkWeather(answer.content.find((block) => block.type === "tool_use").input);
    check(answer.stop_reason === "tool_use", answer);
  },
  async stream_tools() {
    const choice = { type: "tool", name: "weather" };
    const answer = await client.messages.stream({ ...withTools, tool_choice: choice }).finalMessage();
    checkWeather(answer.content.find((block) => block.type === "tool_use").input);
  },
  async count_tokens() {
    const counted = await client.messages.countTokens({ model: MODEL, messages });
    check(counted.input_tokens > 5, counted);
  },
  async errors() {
    try {
      await client.messages.create({ ...asked, model: "nowhere" });
    } catch (error) {
      check(error instanceof NotFoundError && error.message.includes("nowhere"), error.message);
      return;
    }
    throw new Error("no error");
  },
});
