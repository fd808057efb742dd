// Asks a server with one library of agents, which calls a tool; run where the packages are.
//
//     node agent_libraries.mjs LIBRARY URL

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";

const QUESTION = "How is the weather in Ulm?";
const SCHEMA = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const weather = ({ city }) => `sun in ${city}`;

async function ai(model) {
  const asked = {
    model,
    prompt: QUESTION,
    tools: {
      weather: tool({ description: "of a city", inputSchema: jsonSchema(SCHEMA), execute: weather }),
    },
    stopWhen: stepCountIs(3),
  };
  const whole = (await generateText(asked)).text;
  const streamed = streamText(asked);
  await streamed.consumeStream();
  if ((await streamed.text) !== whole) throw new Error("the stream has another text");
  return whole;
}

async function openai_node(url) {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
  const tools = [{ type: "function", name: "weather", parameters: SCHEMA, strict: false }];
  const stream = client.responses.stream({ model: "model", input: QUESTION, tools });
  const first = await stream.finalResponse();
  const [call] = first.output.filter((item) => item.type === "function_call");
  const output = weather(JSON.parse(call.arguments));
  const last = await client.responses.create({
    model: "model",
    previous_response_id: first.id,
    input: [{ type: "function_call_output", call_id: call.call_id, output }],
    tools,
  });
  return last.output_text;
}

const LIBRARIES = {
  openai_node,
  ai_sdk_responses: (url) => ai(createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" })("model")),
  ai_sdk_messages: (url) =>
    ai(createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })("model")),
};

const [library, url] = process.argv.slice(2);
console.log(await LIBRARIES[library](url));
