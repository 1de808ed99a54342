// Quire from Node, straight from its .proto files: a streamed answer, a refusal by field, a stream that is cancelled.

import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";

const includeDirs = ["../..", ".."].map((folder) => fileURLToPath(new URL(folder, import.meta.url)));
const files = ["quire/inference/v1/inference.proto", "google_rpc.proto"];
const definition = loader.loadSync(files, { includeDirs, defaults: true, enums: String, oneofs: true });
const { InferenceService } = grpc.loadPackageDefinition(definition).quire.inference.v1;

// A deadline is a moment; grpc-js ends the call with DEADLINE_EXCEEDED when it has passed.
const within = (seconds) => ({ deadline: Date.now() + 1000 * seconds });

const requestOf = (question, sampling) => ({
  prompt: { chat: { messages: [{ role: "user", content: question }] } },
  sampling,
});

// A stream of responses is an async iterable; each has one event: `admitted`, then `tokens`, and at last `finished`.
async function answer(client, question) {
  let workerId;
  const call = client.generate(requestOf(question, { temperature: 0, maxTokens: 32 }), within(30));
  for await (const { event, admitted, tokens, finished } of call) {
    if (event === "admitted") workerId = admitted.workerId;
    if (event === "tokens") process.stdout.write(tokens.text);
    if (event === "finished") {
      const { reason, usage } = finished;
      const word = reason.replace("FINISH_REASON_", "").toLowerCase();
      console.log(`\n${usage.outputTokens} tokens, ${word}, from ${workerId}`);
    }
  }
}

// The details of a failed call are a google.rpc.Status among its trailers, each packed with the name of its type.
function detailsOf(error) {
  const [packed] = error.metadata.get("grpc-status-details-bin");
  const { details } = definition["google.rpc.Status"].deserialize(packed);
  return new Map(details.map(({ type_url: typeUrl, value }) => {
    const name = typeUrl.split("/").pop();
    return [name, definition[name].deserialize(value)];
  }));
}

async function refusal(client, question) {
  const ask = promisify(client.generateUnary.bind(client));
  try {
    await ask({ request: requestOf(question, { temperature: -1, topP: 2 }) }, within(30));
  } catch (error) {
    const { fieldViolations } = detailsOf(error).get("google.rpc.BadRequest");
    for (const { field, description } of fieldViolations) console.log(`refused: ${field} ${description}`);
  }
}

async function cancel(client, question) {
  const call = client.generate(requestOf(question, { maxTokens: 400, ignoreEos: true }), within(30));
  try {
    for await (const { event, tokens } of call) {
      if (event !== "tokens" || tokens.tokenIds.length === 0) continue;
      console.log(`cancelled after ${tokens.tokenIds.length} tokens`);
      call.cancel(); // the worker stops within two steps and has its memory back
    }
  } catch (error) {
    if (error.code !== grpc.status.CANCELLED) throw error;
  }
}

const [address, question] = process.argv.slice(2);
const client = new InferenceService(address, grpc.credentials.createInsecure());
await answer(client, question);
await refusal(client, question);
await cancel(client, question);
client.close();
