"""Limits on everything that a client or a peer can make grow. docker/OPERATING.md has the table of them.

They are checked before any loop over what they bound. Settings of operators stand in the `config.py` of each service.
"""

from __future__ import annotations

from typing import Final

# ------------------------------------------------------------ public requests

# Bytes of a message on the public gRPC ports; a prompt of a million token ids has 3 MB.
MAX_PUBLIC_MESSAGE_BYTES: Final = 4 << 20
# Calls on one connection to a public gRPC port, unless an option says otherwise; further ones wait at the client. Each
# may have 120 KB of headers and state, and 64 KiB of a message that is not read.
CALLS_PER_CONNECTION: Final = 128
# Sequences of one request.
MAX_SEQUENCES: Final = 64
# Log-probabilities of other tokens beside each sampled one.
MAX_LOGPROBS: Final = 20
# Token ids that a request names for log-probabilities at each position, in place of the most likely ones.
MAX_LOGPROB_TOKEN_IDS: Final = 128
# Priorities lie between minus this and this.
MAX_PRIORITY: Final = 100
# Strings in `stop`; every character of an output is compared with each of them.
MAX_STOP_STRINGS: Final = 16
# Characters of a stop string; a table of this length is built for each string.
MAX_STOP_STRING_CHARS: Final = 1024
# Ids in `stop_token_ids`; they travel in the submission of every sequence.
MAX_STOP_TOKEN_IDS: Final = 1024
# Entries of `logit_bias`; the sampler adds each of them at every step.
MAX_LOGIT_BIASES: Final = 1024
# Texts in `bad_words`, and characters of each; the sampler compares the last tokens with each of them at every step.
MAX_BAD_WORDS: Final = 128
MAX_BAD_WORD_CHARS: Final = 128
# Bytes of a constraint; the grammar compiler's work grows with them.
MAX_CONSTRAINT_BYTES: Final = 64 << 10
# Bytes of the grammar of one custom tool's input, and of all of a request: the router rewrites them on its event loop.
MAX_TOOL_GRAMMAR_BYTES: Final = 8 << 10
MAX_TOOL_GRAMMARS_BYTES: Final = 16 << 10
# Characters of a prediction of the output; the router makes tokens of them.
MAX_PREDICTION_CHARS: Final = 64 << 10
# Messages of a chat; a template takes some 10 microseconds for each.
MAX_CHAT_MESSAGES: Final = 4096
# Tools of a chat; calls in one message of it.
MAX_TOOLS: Final = 128
MAX_TOOL_CALLS: Final = 128
# Bytes of all tools in JSON: some 60,000 tokens.
MAX_TOOLS_BYTES: Final = 256 << 10
# Characters of a tool's name, as OpenAI has it.
MAX_TOOL_NAME_CHARS: Final = 64
# Documents of a chat.
MAX_DOCUMENTS: Final = 1024
# Further variables of a chat template, and their bytes in JSON.
MAX_TEMPLATE_VARIABLES: Final = 64
MAX_TEMPLATE_BYTES: Final = 64 << 10
# A number in them lies between minus this and this: a template may repeat a text so many times, or count so far.
MAX_TEMPLATE_NUMBER: Final = 1_000_000
# Special tokens that stay in the text of an output, and characters of each.
MAX_KEPT_TOKENS: Final = 32
MAX_KEPT_TOKEN_CHARS: Final = 64
# Characters of a mark of thoughts, and of the text that ends a thought by force; both are compared token by token.
MAX_THOUGHT_MARK_CHARS: Final = 64
MAX_THOUGHT_END_CHARS: Final = 256
# Pairs of a response's metadata, and characters of a name and of a value, as OpenAI has them.
MAX_METADATA: Final = 16
MAX_METADATA_KEY_CHARS: Final = 64
MAX_METADATA_CHARS: Final = 512
# Ids of requests that one call of a gateway ends; each is looked for at all routers of the port.
MAX_ABORTED_IDS: Final = 128
# Characters of a request id.
MAX_REQUEST_ID_CHARS: Final = 128
# Characters of a session id; it is hashed before anything keeps it.
MAX_SESSION_ID_CHARS: Final = 256
# Characters of a tenant's name, which the file of tenants declares.
MAX_TENANT_CHARS: Final = 64
# Characters of a cache salt; it is hashed with every prompt.
MAX_SALT_CHARS: Final = 256
# Ranges of a prompt that a request may retain, and those of them that end at a message of a chat: for each of these the
# beginning of the chat is rendered and made tokens of once more.
MAX_RETENTION_RANGES: Final = 16
MAX_RETENTION_MESSAGE_RANGES: Final = 4
# Blocks of a worker, as long as the manager's `--max-blocks-per-worker` does not say otherwise.
MAX_WORKER_BLOCKS: Final = 1 << 20
# Prefixes that operators pin, and the blocks of all of them, where a shared beginning counts for each: 1 MiB of hashes
# in Redis. A change of the largest number takes some 10 ms for each size of worker to check, and up to 0.5 s for each
# worker that has all of them cached, in steps of some 10 ms, up to 40 ms on a busy machine.
MAX_PINS: Final = 256
MAX_PINNED_BLOCKS: Final = 65_536
# Of a prefix that is to come to a worker ahead of need: its blocks are looked for in one turn, some 10 ms.
MAX_PREFETCHED_BLOCKS: Final = 1 << 13
# Characters of a pin's name, and of its tenant: a tenant's name, or an address where callers have no keys.
MAX_PIN_NAME_CHARS: Final = 64
MAX_PINNED_TENANT_CHARS: Final = 128
# Seconds of a pin that has an end; some 300 years.
MAX_PIN_SECONDS: Final = 1e10
# Characters of a traceparent, 55 today; a longer one is ignored, as the standard asks of a malformed one.
MAX_TRACEPARENT_CHARS: Final = 256
MAX_TRACESTATE_CHARS: Final = 512  # what W3C wants everybody to pass on
# Characters of a client's text that an error quotes.
MAX_QUOTED_CHARS: Final = 40
# Bytes of a text that shorter ones may wait for; about 0.1 s of one thread. Longer texts have a thread of their own. A
# text that is likely too long is made tokens in parts of this size, which are counted.
SHORT_TEXT_BYTES: Final = 64 << 10
# Bytes that one tenant may have waiting for each of the two threads; about 20 s of one thread.
MAX_WAITING_TEXT_BYTES_A_TENANT: Final = 16 << 20
# Worker breaks after which a suspected request is refused, and not tried at another worker.
MAX_STRIKES: Final = 2

# ------------------------------------------------------------ between router and worker

# Bytes of one submission; a larger one would break the stream that all requests of the worker share.
MAX_SUBMIT_BYTES: Final = 15 << 20
# Bytes that may wait for a worker that does not read; further requests are refused meanwhile.
MAX_OUTBOX_BYTES: Final = 128 << 20
# Requests of one tenant that a router looks for at once, to resume them; each asks every worker.
MAX_RESUMES_A_TENANT: Final = 256
# Handles of a stream go up to here and begin again at 1: they are packed as signed 32-bit integers.
MAX_HANDLE: Final = (1 << 31) - 1
# Reasons for which a worker is absent that are remembered, so that each is logged once.
MAX_LOGGED_REASONS: Final = 16

# ------------------------------------------------------------ HTTP

# Bytes of a request line and its headers, trailers included; proxies send up to 32 KiB.
MAX_HTTP_HEAD_BYTES: Final = 64 << 10
# Header lines of a request, trailers included.
MAX_HTTP_HEADERS: Final = 100
# Requests that a client may send ahead on one connection, beyond the one that is served.
MAX_HTTP_PIPELINED: Final = 16
# Seconds from a connection's first moment, or a request's first byte, to the end of its headers. A handshake of TLS
# has as many before.
HTTP_HEAD_SECONDS: Final = 10.0
# Seconds from the end of the headers to the end of the body: 70 kB/s for the largest body.
HTTP_BODY_SECONDS: Final = 60.0
# Seconds that a connection may idle between two requests: longer than clients and proxies keep one (httpx 5 s, nginx
# 60 s, those in Go 90 s), else a request meets its end.
HTTP_IDLE_SECONDS: Final = 120
# Seconds in which a client must take some of an answer that waits for it; then its connection is cut.
HTTP_STALL_SECONDS: Final = 60.0
# Seconds without output after which a stream of events gets a comment; proxies cut silent connections.
EVENT_SILENCE_SECONDS: Final = 10.0
# Seconds in which a refused connection is still read, so that the client sees the refusal before the reset.
HTTP_LINGER_SECONDS: Final = 1.0
# Tenants that metrics may name: each has some 120 series.
MAX_METRICS_TENANTS: Final = 1000
# Connections to a port of metrics and probes, of all and of one address.
MAX_METRICS_CONNECTIONS: Final = 128
MAX_METRICS_CONNECTIONS_A_PEER: Final = 32
# Those of them that a site beside the metrics may have; the others are for probes and scrapers.
MAX_SITE_CONNECTIONS: Final = 64
MAX_SITE_CONNECTIONS_A_PEER: Final = 24
# Bytes of a body; docs/decisions/0048 has what parsing costs.
MAX_HTTP_BODY_BYTES: Final = 4 << 20
# The same of a conversation, whose images do not reach the model; the rest of it has at most MAX_HTTP_BODY_BYTES.
MAX_HTTP_CHAT_BYTES: Final = 16 << 20
# Values in a body: entries of lists and objects, at every level. A prompt may have 128,000 token ids.
MAX_HTTP_BODY_VALUES: Final = 135_000
# Members of objects in a body, at every level; each costs eight times as much as an entry of a list.
MAX_HTTP_BODY_MEMBERS: Final = 16_384
# Lists and objects in a body.
MAX_HTTP_BODY_CONTAINERS: Final = 8_192
# Levels of lists and objects in a body. A level of a JSON schema takes two.
MAX_HTTP_BODY_DEPTH: Final = 64
# Bytes of all bodies in the process whose requests are not answered yet; small bodies do not count.
MAX_HTTP_BODIES_BYTES: Final = 64 << 20
SMALL_HTTP_BODY_BYTES: Final = 64 << 10
# Characters of a text for /tokenize: a prompt of 128,000 tokens.
MAX_TOKENIZE_CHARS: Final = 512 << 10
# Inputs of one request for embeddings, as OpenAI has it, and those of them that are at workers at once.
MAX_EMBEDDING_INPUTS: Final = 2_048
MAX_EMBEDDINGS_AT_ONCE: Final = 32
# Sequences of one HTTP body: prompts times n.
MAX_HTTP_SEQUENCES: Final = 128

# ------------------------------------------------------------ output that waits for a slow reader

# Bytes of one request's output, as Python holds them: 1,500 tokens with 20 log-probabilities each.
MAX_OUTPUT_BYTES: Final = 4 << 20
# The same of an answer that is sent as a whole: it waits for the router alone, which encodes it in small parts. To free
# a million objects takes 0.1 s of one turn.
MAX_WHOLE_OUTPUT_BYTES: Final = 24 << 20
# Bytes of all requests' output; beyond it each request ends that has more than SMALL_OUTPUT_BYTES.
MAX_ALL_OUTPUT_BYTES: Final = 64 << 20
SMALL_OUTPUT_BYTES: Final = 64 << 10
# Seconds in which a client that was too slow must take what was sent before; then its call is cancelled.
OUTPUT_STALL_SECONDS: Final = 60.0

# ------------------------------------------------------------ answers that are sent as a whole

# Bytes of one answer in JSON: 64 sequences of 500 tokens with 20 log-probabilities have 50 MB.
MAX_ANSWER_BYTES: Final = 64 << 20
# Bytes of all such answers of an API that are collected or sent; beyond it the next one ends that has more than
# SMALL_ANSWER_BYTES.
MAX_ALL_ANSWER_BYTES: Final = 96 << 20
SMALL_ANSWER_BYTES: Final = 64 << 10
# Bytes of one answer in a gRPC message: what our own channels take, less its envelope.
MAX_REPLY_BYTES: Final = (16 << 20) - (64 << 10)

# ------------------------------------------------------------ stored responses

# Stored responses whose items one request may refer to; each is read as a whole.
MAX_REFERENCED_RESPONSES: Final = 16
# Bytes of one stored response, with the conversation before it: about 250,000 tokens.
MAX_RESPONSE_BYTES: Final = 1 << 20
# Entries and bytes of one tenant, and of all; the oldest makes room.
MAX_RESPONSES_A_TENANT: Final = 1_000
MAX_RESPONSES_BYTES_A_TENANT: Final = 16 << 20
MAX_RESPONSES: Final = 16_384
MAX_RESPONSES_BYTES: Final = 64 << 20
# Background responses that a router works on, of one tenant and of all, and as many that have ended and whose events
# can still be read.
MAX_BACKGROUND_A_TENANT: Final = 16
MAX_BACKGROUND: Final = 64
# Bytes of the events of one of them that can be read again: some 3,000 tokens. Earlier ones are dropped.
MAX_BACKGROUND_EVENTS_BYTES: Final = 1 << 20
# Seconds from its creation to the end of a background response.
BACKGROUND_SECONDS: Final = 3600.0

# ------------------------------------------------------------ files and batches of clients (--batch-dir)

# Bytes of an uploaded file, and its lines, as OpenAI has them.
MAX_BATCH_FILE_BYTES: Final = 200 << 20
MAX_BATCH_LINES: Final = 50_000
# Files of one tenant, and the bytes of all of them, answers included.
MAX_BATCH_FILES_A_TENANT: Final = 1_000
MAX_BATCH_BYTES_A_TENANT: Final = 4 << 30
# Characters of a file's name, which is shown and names nothing on disk.
MAX_FILE_NAME_CHARS: Final = 255
# Bytes that stay free on the disk of uploads; with less, none is taken.
MIN_FREE_BATCH_BYTES: Final = 1 << 30
# Uploads that a router receives at once, of all and of one tenant.
MAX_UPLOADS: Final = 8
MAX_UPLOADS_A_TENANT: Final = 2
# Seconds from the end of an upload's headers to the end of its body: 350 kB/s for the largest one.
HTTP_UPLOAD_SECONDS: Final = 600.0
# Seconds for which a file is kept unless its client says otherwise, and the bounds of what it may say, as OpenAI has
# them. A batch that has ended is listed for as long.
BATCH_FILE_SECONDS: Final = 30 * 86_400
MIN_BATCH_FILE_SECONDS: Final = 3_600
MAX_BATCH_FILE_SECONDS: Final = 30 * 86_400
# Batches of one tenant that have not ended, and all that are listed; of those that ended, the oldest makes room.
MAX_OPEN_BATCHES_A_TENANT: Final = 64
MAX_BATCHES_A_TENANT: Final = 1_000
# Seconds that a client may leave for a batch; what is not done by then expires.
MAX_BATCH_SECONDS: Final = 7 * 86_400
# Requests of batches that a router sends at once, and the batches that they are of, each of another tenant.
MAX_BATCH_REQUESTS: Final = 64
MAX_BATCHES_AT_ONCE: Final = 16

# ------------------------------------------------------------ constraints of structured output

# Constraints that wait to be examined by a router, of one tenant or peer address, and of all.
MAX_CONSTRAINTS_A_PEER: Final = 32
MAX_CONSTRAINTS: Final = 256
# Constraints that a router examines at once, at most one of each tenant or peer address.
MAX_CONSTRAINTS_AT_ONCE: Final = 2
# Seconds of processor time to examine one constraint, so that a busy machine refuses no more than an idle one. Memory
# grows by about 100 MB a second meanwhile (measured).
CONSTRAINT_CPU_SECONDS: Final = 3.0
# Seconds of processor time to try outputs of a constraint that compiles; what is not tried by then is let pass.
CONSTRAINT_TRIAL_SECONDS: Final = 0.25
# Seconds on the wall clock, against a process that waits for something that never comes.
CONSTRAINT_SECONDS: Final = 120.0
# A valid constraint that takes more seconds of processor time is costly. Few verdicts on costly ones are kept, so that
# no client can gather many and send them to the workers at once.
COSTLY_CONSTRAINT_SECONDS: Final = 0.2
MAX_COSTLY_VERDICTS: Final = 16
# Constraints of one router that wait for compilation at a worker.
MAX_GRAMMARS_WAITING: Final = 256

# ------------------------------------------------------------ messages, ids and log lines

MAX_ID_CHARS: Final = 128  # characters of a worker's id: it stands in log lines, metrics and keys of Redis
# Lines of decisions at level info in a second, of each kind; and what stands in one of candidates and reasons.
MAX_DECISION_LINES: Final = 5
# Lines of refused requests in a second, of each reason; seconds between two lines of requests whose clients have left.
MAX_REFUSAL_LINES: Final = 5
CANCELLED_LINE_SECONDS: Final = 10.0
MAX_LINE_ITEMS: Final = 4
MAX_LINE_REASON_CHARS: Final = 256
MALFORMED_LINE_SECONDS: Final = 10.0  # seconds between two log lines about undecodable messages of one method

# ------------------------------------------------------------ traces and decisions

MAX_SPAN_BYTES: Final = 64 << 10  # bytes of a kept span: a decision over 64 workers, the largest of ours, takes 25 KB
MAX_ATTRIBUTE_CHARS: Final = 4 << 10  # characters of a text in a span: ten times the longest of our own
MAX_SPAN_ITEMS: Final = 128  # attributes, events or links of a span, and attributes of an event: the SDK's own limits
MAX_TRACE_SPANS: Final = 2_000  # spans of a trace from one sender: 64 sequences, each with some preemptions, make 500
MAX_TRACE_BYTES: Final = 4 << 20  # bytes of a trace from one sender: GetTrace answers with one message
MAX_EXPORTED_SPANS: Final = 4_096  # spans of one OTLP message: eight batches of the SDK, 40 ms of the event loop
MAX_SENDER_SHARE: Final = 0.75  # share of the span ring that one sender may hold: the newest traces of others stay
MAX_LISTED_DECISIONS: Final = 1_000  # records in one answer: a few milliseconds of the event loop
MAX_LOG_MEMBER_BYTES: Final = 8 << 20  # bytes of a member of a decision log, decompressed; ours: 128 KiB or one record
MAX_LOG_FILE_BYTES: Final = 64 << 20  # bytes of a file that is read; ours have 16 MiB
MAX_LOG_QUEUE: Final = 65_536  # decision records that wait for the disk
MAX_LOG_QUEUE_BYTES: Final = 32 << 20  # memory of these records, about; the ring holds most of them anyway
MAX_LOG_FOLDERS: Final = 256  # folders in the directory of a decision log: processes that ran at once
MAX_MAPPED_BLOCKS: Final = 1 << 16  # blocks in one page of a block map: some 10 ms of the event loop
MAX_MAPPED_SEQUENCES: Final = 256  # sequences beside the page
MAX_SHOWN_HOLDERS: Final = 16  # sequences that are named as holders of one block
MAX_LISTED_BYTES: Final = 8 << 20  # bytes of the records in one answer, about; our own channels take 16 MiB
MAX_WATCHED_DECISIONS: Final = 128  # records in one message to a watcher
MAX_WATCHED_BYTES: Final = 1 << 20  # bytes of these records, about
MAX_DECISION_WATCHERS: Final = 16  # watchers of one process's decisions
MAX_LEADER_WATCHERS: Final = 2048  # watchers of a manager's leader: its workers, routers and standbys
MAX_EXPLANATIONS_AT_ONCE: Final = 8  # dry runs at once; each tokenises a prompt and asks the prefix index
MAX_EXPLANATIONS_A_TENANT: Final = 2  # of these, of one tenant: a dry run is not charged to its rates
CLIENT_TRACES_PER_SECOND: Final = 1.0  # requests a second that are traced because their client asks for it
CLIENT_TRACES_BURST: Final = 10  # requests that may be traced at once because their clients ask for it
KEPT_TRACES_PER_SECOND: Final = 5.0  # requests a second that each tail rule keeps: a built trace takes about 1 ms
KEPT_TRACES_BURST: Final = 100  # requests that a tail rule may keep at once
MAX_TRACES_TO_BUILD: Final = 512  # kept requests whose trace is not built yet; a silent KV manager lets them wait
MAX_KEPT_RECORDS: Final = 64  # records of a kept request, from each service
KEPT_RECORDS_SHARE: Final = 0.25  # memory of the records of kept requests, as a share of the decision ring's
# Records of refused requests that enter the decision ring in a second, and at once: all, and those of one tenant and
# reason. All are kept beside it for `quire why ID`, in a share of its memory, the newest of each tenant and reason.
REFUSALS_PER_SECOND: Final = 5.0
REFUSALS_BURST: Final = 500
ALIKE_REFUSALS_PER_SECOND: Final = 1.0
ALIKE_REFUSALS_BURST: Final = 50
REFUSED_RECORDS_SHARE: Final = 0.125
MAX_REFUSAL_GROUPS: Final = 32

# ------------------------------------------------------------ tenants

# ------------------------------------------------------------ lease protocol

# Epochs that a peer or Redis may name although nothing here has reached them; no pool starts 4 billion managers.
MAX_FOREIGN_EPOCH: Final = 1 << 32
# Epochs beyond that, and beyond the highest one known here: each wipe of Redis skips up to 65,536.
MAX_EPOCH_LEAD: Final = 1 << 20
# The highest epoch in a state file; Redis counts exactly up to 2^53.
MAX_STORED_EPOCH: Final = 1 << 48
# Characters of HOST:PORT; a DNS name has at most 253.
MAX_ADDRESS_CHARS: Final = 260
# Characters of each text of a pool's identity; fingerprints have 64.
MAX_IDENTITY_CHARS: Final = 1024
# Groups of layers of a pool, each with the pages of its blocks and its layers.
MAX_KV_GROUPS: Final = 16
MAX_BLOCK_PAGES: Final = 4096
MAX_GROUP_LAYERS: Final = 4096
# Sequences of one worker that a manager keeps, about 1 KB each.
MAX_WORKER_SEQUENCES: Final = 1 << 18
# Messages that may wait for a worker that does not read its lease stream; then the session ends.
MAX_UNREAD_MESSAGES: Final = 8192

# ------------------------------------------------------------ worker

# Streams of routers at a worker, those included that ended and whose sequences still run. Each router process has one.
MAX_ROUTER_STREAMS: Final = 64
# Seconds from the opening of a router's stream to its hello.
ROUTER_HELLO_SECONDS: Final = 10.0
# Ids in one list of a submission, ends of the checkpoint included; the router's own limits are lower.
MAX_SUBMIT_IDS: Final = 16_384
# Sequences of one router that have not ended: a router's whole queue, each request with 16 sequences.
MAX_STREAM_SEQUENCES: Final = 16_384
# Bytes of their prompts and constraints: 16 million tokens, which take some 0.6 GB as Python's integers.
MAX_STREAM_PROMPT_BYTES: Final = 64 << 20
# Bytes of outputs that a router has not read: 5 million tokens, or 170,000 tokens with 20 log-probabilities each.
MAX_STREAM_OUTPUT_BYTES: Final = 64 << 20
# Sequences that have ended and whose outputs a router may not have passed on, of one router, and their bytes.
MAX_ENDED_SEQUENCES: Final = 4096
MAX_ENDED_BYTES: Final = 32 << 20
# Bytes of the log-probabilities of one sequence that are kept for another router, as Python holds them: 740 tokens with
# 20 each. A client that lags further behind cannot go on at another router.
MAX_KEPT_LOGPROBS_BYTES: Final = 2 << 20
# Sequences of lost routers that run on for a while, of one tenant and in all; bytes of their prompts and outputs.
MAX_ORPHANS_A_TENANT: Final = 1024
MAX_ORPHANS: Final = 2048
MAX_ORPHAN_BYTES_A_TENANT: Final = 32 << 20
MAX_ORPHAN_BYTES: Final = 64 << 20
# Orphans (abandoned sequences) of a worker without a router live so many times their grace: a router may start slowly,
# on an overloaded machine. No new request comes for their blocks meanwhile.
ORPHANS_ALONE: Final = 12
# Bytes of what a sequence's submit carries for another router: stop strings and names of special tokens.
MAX_CONTINUATION_BYTES: Final = 128 << 10
# Messages that a KV manager has not read: some 20 s of reports; then the session begins anew from an inventory.
MAX_LEASE_OUTBOX: Final = 4096
# Addresses of one name in --manager that are followed: each is a stream, and DNS may answer anything.
MAX_NAMED_MANAGERS: Final = 64
# Bytes of one message with outputs: what a router takes over in one turn of its loop, up to 11,000 tokens or 330 with
# 20 log-probabilities each.
MAX_OUTPUT_MESSAGE_BYTES: Final = 128 << 10

# ------------------------------------------------------------ workers that fetch blocks from each other

# Contents of one request, of 16 or 17 bytes each, and the images of all: one of each page.
MAX_PEER_ITEMS: Final = 512
MAX_PEER_IMAGES: Final = 8192
# Bytes of the image of one block, or page.
MAX_PEER_IMAGE_BYTES: Final = 64 << 20
# Connections that have shown a valid token, and those of them of one worker. Further ones are refused.
MAX_PEER_CONNECTIONS: Final = 64
MAX_PEER_CONNECTIONS_A_WORKER: Final = 4
# Connections that have not shown one yet, and those of one address. They have so many seconds for it.
MAX_PEER_STRANGERS: Final = 32
MAX_PEER_STRANGERS_AN_ADDRESS: Final = 16
PEER_HELLO_SECONDS: Final = 10.0
# Seconds between the clocks of the machines of a manager and of a worker, for the end of a token.
PEER_TOKEN_DRIFT_SECONDS: Final = 300.0
# Seconds between two lines about refused peers, of each reason.
PEER_LINE_SECONDS: Final = 10.0

# ------------------------------------------------------------ adapters

# Characters of the name of a LoRA adapter, and of the path of its folder.
MAX_ADAPTER_NAME_CHARS: Final = 128
MAX_ADAPTER_PATH_CHARS: Final = 4096
# Adapters that a worker knows, in memory or not; each has a row in its messages to routers.
MAX_ADAPTERS: Final = 1024
# Bytes of an adapter_config.json; as PEFT writes it, it has about 1,200.
MAX_ADAPTER_CONFIG_BYTES: Final = 1 << 20
# Loads that one router may have waiting at a worker.
MAX_ADAPTER_LOADS: Final = 64
# Of those that a worker knows, one tenant's own: so that no tenant takes the names of all others.
MAX_OWN_ADAPTERS: Final = MAX_ADAPTERS // 4
# Names, or beginnings of names, of one tenant's own adapters; each load at a worker carries them.
MAX_OWN_ADAPTER_NAMES: Final = 64
# The largest rank that --max-lora-rank allows.
MAX_ADAPTER_RANK: Final = 512

# ------------------------------------------------------------ Redis

# Workers that discovery reads in one poll; of a larger set, as many drawn at random.
MAX_DISCOVERED_WORKERS: Final = 1024
# Bytes of the set of worker ids in Redis, as MEMORY USAGE counts them.
MAX_DISCOVERY_SET_BYTES: Final = 1 << 20
# Bytes of one worker's entry for discovery; as written it has about 800.
MAX_DISCOVERY_ENTRY_BYTES: Final = 8192
# Seconds between the writing of a signed entry and its reading, by the clocks of two machines.
MAX_DISCOVERY_ENTRY_AGE_S: Final = 300
# Of the time since an entry was fresh: how far the two clocks may have drifted apart beyond that. Quartz stays below
# a thousandth.
MAX_DISCOVERY_DRIFT: Final = 0.01
# Refused entries that are named in one log line and in the status.
MAX_NAMED_ENTRIES: Final = 8
# Bytes of one block's value in the prefix index that count: 1,024 workers.
MAX_INDEX_VALUE_BYTES: Final = 6 << 10
# Bytes of one field that names the worker of a slot in the prefix index; as written they have at most 260.
MAX_INDEX_OWNER_BYTES: Final = 512
