// Calls a server by Vercel's AI SDK, and prints what each call got; reads {"url", "model", "calls": [...]} in JSON.
// A call is a name and a provider: "compatible" is for servers with OpenAI's chats, "openai" speaks the Responses API.

import { readFileSync } from "node:fs";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, isStepCount, Output, streamObject, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
const given = JSON.parse(readFileSync(0, "utf8"));
const prompt = "Where does Anna live?";
const schema = z.object({ name: z.enum(["Lyon", "Basel"]), big: z.boolean() });
const findTown = tool({
  description: "Finds a town.",
  inputSchema: schema,
  execute: async ({ name, big }) => `${name} is ${big ? "big" : "small"}.`,
});
const providers = {
  compatible: () =>
    createOpenAICompatible({
      name: "quire",
      baseURL: given.url,
      apiKey: "none",
      includeUsage: true,
      supportsStructuredOutputs: true,
    })(given.model),
  openai: () => createOpenAI({ baseURL: given.url, apiKey: "none" }).responses(given.model),
};

function common(kind, more) {
  return { model: providers[kind](), prompt, maxRetries: 0, maxOutputTokens: 400, ...more };
}

const calls = {
  // The text of an answer, whole and streamed, and the tokens that were counted.
  async text(kind) {
    const whole = await generateText(common(kind, { temperature: 0, maxOutputTokens: 16 }));
    const stream = streamText(common(kind, { temperature: 0, maxOutputTokens: 16 }));
    const pieces = [];
    for await (const piece of stream.textStream) pieces.push(piece);
    const usage = await stream.usage;
    return [whole.text, pieces, whole.usage.outputTokens, usage.outputTokens];
  },

  // The call of a named tool, whole and streamed.
  async tools(kind) {
    const forced = { tools: { findTown: { ...findTown, execute: undefined } } };
    const choice = { toolChoice: { type: "tool", toolName: "findTown" }, temperature: 1 };
    const whole = await generateText(common(kind, { ...forced, ...choice }));
    const stream = streamText(common(kind, { ...forced, ...choice }));
    const found = [whole.toolCalls, await stream.toolCalls];
    return found.map((each) => each.map((call) => [call.toolName, call.input]));
  },

  // Objects in all ways in which the package asks for one.
  async objects(kind) {
    const settings = common(kind, { temperature: 1 });
    const older = await generateObject({ ...settings, schema });
    const text = await generateText({ ...settings, output: Output.object({ schema }) });
    const stream = streamObject({ ...settings, schema });
    for await (const _ of stream.partialObjectStream);
    return [older.object, text.output, await stream.object];
  },

  // The answer to the result of a tool that the package runs itself.
  async steps(kind) {
    const stream = streamText(common(kind, { tools: { findTown }, stopWhen: isStepCount(3) }));
    const text = [];
    for await (const piece of stream.textStream) text.push(piece);
    const steps = await stream.steps;
    return [text.join(""), steps.map((step) => step.finishReason)];
  },

  // The same, with an answer that must be an object.
  async steps_to_object(kind) {
    const settings = common(kind, { tools: { findTown }, stopWhen: isStepCount(3), output: Output.object({ schema }) });
    return (await generateText(settings)).output;
  },
};

const found = [];
for (const [name, kind] of given.calls) found.push(await calls[name](kind));
process.stdout.write(JSON.stringify(found));
