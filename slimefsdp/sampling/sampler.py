"""Samples many requests at once by continuous batching, with the log-prob of each token at the moment it was drawn.

A sample takes a free row of the batch, and leaves the row when the sample ends. So the batch stays full, and no sample
waits for a longer sample. Free rows go to the waiting client with the fewest rows; the requests of a client are served
in their order. Reading a prompt computes its keys and values, once for all samples of the prompt. Prompts are read as
packs, and rows are decoded as packs of single tokens, by the model class that is trained
(`slimefsdp.models.decoder.PolicyModel`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
import torch

from slimefsdp import heartbeat
from slimefsdp.batching.cp_sharding import zigzag_layout
from slimefsdp.data.fields import UNKNOWN_EXPERT
from slimefsdp.errors import BatchError, StateError
from slimefsdp.models.decoder import PolicyModel
from slimefsdp.models.fused_log_probs import token_log_probs
from slimefsdp.sampling.draw import draw, require_finite
from slimefsdp.sampling.kv_cache import KeysValues, PromptAttention, RowCache, require_layers
from slimefsdp.sampling.params import FinishReason, SampledTokens, SamplingParams, TopTokens, VersionSpan

_DRAWS = 64  # number of random numbers to generate at once for a row
_TOP_ROWS = 128  # number of rows of logits to compute at once for the top tokens of a prompt
_LARGEST_WORD = 2**32 - 1


@dataclass(slots=True, eq=False)
class _Request:
    number: int
    context: Sequence[int]  # the prompt; for a sample that continues after a weight update, also its tokens
    samples: list[_Sample]
    wants_prompt_log_probs: bool = False
    prompt_top_k: int = 0
    client: str | None = None
    cached: list[KeysValues] = field(default_factory=list)  # keys and values of the context, by layer
    experts: np.ndarray | None = None  # int16 [context, layers, experts of a token], if they are recorded
    logits: torch.Tensor | None = None  # [vocab], after the context


@dataclass(slots=True, eq=False)
class _Sample:
    place: tuple[int, int]
    prompt: Sequence[int]
    params: SamplingParams
    rng: np.random.Generator
    client: str | None = None
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    drawn: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # the weight versions that drew tokens, in order
    firsts: list[int] = field(default_factory=list)  # index of the first token of each version
    experts: list[np.ndarray] = field(default_factory=list)  # of prompt and tokens, when they were first computed

    def next_number(self) -> float:
        if not self.drawn:
            self.drawn = self.rng.random(_DRAWS).tolist()
        return self.drawn.pop()

    def add(self, token: int, log_prob: float, version: int) -> None:
        """Appends a token that weights of this version drew."""
        if not self.versions or self.versions[-1] != version:
            self.versions.append(version)
            self.firsts.append(len(self.tokens))
        self.tokens.append(token)
        self.log_probs.append(log_prob)

    def add_experts(self, experts: np.ndarray | None) -> None:
        """Appends the experts of context tokens that have none yet; `experts` are those of the whole context."""
        if experts is not None:
            self.experts.append(experts[sum(map(len, self.experts)) :].copy())  # not a view of a whole pack

    def completion(self, finish_reason: FinishReason) -> tuple[int, int, SampledTokens]:
        """Returns the sample as `step` returns it."""
        spans = map(VersionSpan, self.versions, self.firsts, [*self.firsts[1:], len(self.tokens)])
        experts = np.concatenate(self.experts) if self.experts else None
        return *self.place, SampledTokens(self.tokens, self.log_probs, finish_reason, tuple(spans), experts)


class Sampler:
    """Samples with one model by continuous batching.

    Args:
        policy: a model in eval mode with unsharded weights. The weights may change between steps if `take_new_weights`
            is called.
        max_rows: limit on the samples that are decoded at once, and thus on the cache.
        prompt_tokens: limit on the tokens of prompts to read at once; a longer prompt is read alone.
        decode: converts token ids to text, for requests with stop texts.
        numbers: yields the numbers of requests; None means 0, 1, ...
        records_experts: whether samples have `routed_experts`; the model then has experts.

    Raises:
        StateError: the model is in training mode.
    """

    def __init__(
        self,
        policy: PolicyModel,
        *,
        max_rows: int = 256,
        prompt_tokens: int = 8192,
        decode: Callable[[Sequence[int]], str] | None = None,
        numbers: Iterator[int] | None = None,
        records_experts: bool = False,
    ) -> None:
        assert max_rows > 0 and prompt_tokens > 0
        if policy.training:
            raise StateError(
                "the model is in training mode: dropout would change the log-probs",
                field="model",
                hint="call model.eval() first",
            )
        self._policy = policy
        self._max_rows = max_rows
        self._prompt_tokens = prompt_tokens
        self._decode = decode
        self._records_experts = records_experts
        self._waiting: deque[_Request] = deque()
        self._rows: list[_Sample] = []  # by row of the cache
        self._last: list[int] = []  # the last token of each row
        self._cache = RowCache(max_rows)
        self._numbers = count() if numbers is None else numbers
        self.tokens_drawn = 0  # of all samples so far
        self._version = 0  # of the current weights
        self._read_prompts: list[tuple[int, np.ndarray, TopTokens | None]] = []  # not returned by `take_prompts` yet

    @property
    def is_idle(self) -> bool:
        return not self._rows and not self._waiting

    @property
    def running_rows(self) -> int:
        return len(self._rows)

    @property
    def waiting_rows(self) -> int:
        """Returns the number of samples that wait for a row, plus prompts whose log-probs alone are requested."""
        return sum(max(1, len(request.samples)) for request in self._waiting)

    @property
    def waiting_requests(self) -> int:
        """Returns the number of requests that wait for rows, or for their prompt to be read."""
        return len(self._waiting)

    @property
    def cache_bytes(self) -> int:
        """Returns the bytes of the rows' keys and values; 0 while idle."""
        return self._cache.nbytes

    def add(
        self,
        prompt: Sequence[int],
        samples: int,
        params: SamplingParams,
        *,
        prompt_log_probs: bool = False,
        prompt_top_k: int = 0,
        client: str | None = None,
    ) -> int:
        """Queues samples of a prompt, after earlier samples of the same client.

        Args:
            samples: at least 1, or at least 0 with prompt_log_probs.
            prompt_log_probs: makes `take_prompts` return the log-probs of this prompt after it was read.
            prompt_top_k: makes `take_prompts` return this many of the most likely tokens for each position; 0 means
                none.
            client: the sender; None stands for one more client.

        Returns:
            The request's number.

        Raises:
            BatchError: the prompt has no tokens, nothing is requested, or there is a stop text but no `decode`.
        """
        number = next(self._numbers)
        if len(prompt) == 0:
            problem = f"prompt {number} has no tokens"
            raise BatchError(problem, field="prompts", hint="drop it or give it text")
        if samples < (0 if prompt_log_probs else 1):
            raise BatchError(
                f"samples={samples}; it must be 1 or more, or 0 with prompt_log_probs", field="samples", hint="raise it"
            )
        if params.stop and self._decode is None:
            raise BatchError("stop texts need a tokenizer", field="stop", hint="give the sampler its decode function")
        drawn = [
            _Sample((number, index), prompt, params, _generator(params.seed, index), client) for index in range(samples)
        ]
        self._waiting.append(_Request(number, prompt, drawn, prompt_log_probs, prompt_top_k, client))
        return number

    def take_prompts(self) -> list[tuple[int, np.ndarray, TopTokens | None]]:
        """Returns the log-probs of prompts that were read since the last call, for requests with prompt_log_probs.

        Returns:
            (number of the request; [prompt tokens] log_softmax(logits) of each token given all earlier tokens; the most
            likely tokens, if requested). The first log-prob is NaN. The dtype is float64 for a float64 model, else
            float32. If the weights changed since, log-probs are those of the weights that read the prompt first.
        """
        taken, self._read_prompts = self._read_prompts, []
        return taken

    def take_new_weights(self, version: int) -> None:
        """Continues with changed weights; the context of all running samples will be recomputed."""
        self._version = version
        running = [_Request(row.place[0], [*row.prompt, *row.tokens], [row], client=row.client) for row in self._rows]
        for request in self._waiting:
            request.cached, request.logits = [], None
        self._waiting.extendleft(reversed(running))
        self._forget_rows()

    def abort(self, requests: Collection[int] | None = None) -> list[tuple[int, int, SampledTokens]]:
        """Ends running and waiting samples with the tokens that they have, and returns them as `step` does.

        Args:
            requests: the numbers of the requests to end; None means all.
        """
        rows = [row for row, sample in enumerate(self._rows) if requests is None or sample.place[0] in requests]
        samples = [self._rows[row] for row in rows]
        if len(rows) == len(self._rows):
            self._forget_rows()
        else:
            self._remove(rows)
        waiting, self._waiting = self._waiting, deque()
        for request in waiting:
            if requests is None or request.number in requests:
                samples += request.samples
            else:
                self._waiting.append(request)
        return [sample.completion("abort") for sample in samples]

    def _forget_rows(self) -> None:
        self._rows, self._last = [], []
        self._cache = RowCache(self._max_rows)  # a new cache, because an error may have left the old one in any state

    @torch.no_grad()
    def step(self, may_begin: int | None = None) -> list[tuple[int, int, SampledTokens]]:
        """Fills free rows and draws one more token for every row; returns the samples that have ended.

        Args:
            may_begin: limit on the waiting samples that get a row; None means no limit.

        Returns:
            (number of the request, number of the sample in it, the sample); empty if the sampler is idle.

        Raises:
            ModelError: the model keeps a state other than keys and values.
            StateError: logits are not finite. All samples have been removed.
        """
        try:
            ended = self._fill_rows(may_begin)
            if self._rows:
                positions = self._cache.begin_step()
                tokens = torch.tensor(self._last, device=positions.device)
                hidden = self._policy.hidden_states(tokens, positions, self._cache)
                if (experts := self._experts()) is not None:
                    for row, sample in enumerate(self._rows):
                        sample.experts.append(experts[row : row + 1].copy())  # not a view of all rows
                ended += self._draw(self._rows, self._logits(hidden), first_row=0)
        except BaseException:
            self.abort()
            raise
        heartbeat.tick()
        return ended

    def _fill_rows(self, may_begin: int | None) -> list[tuple[int, int, SampledTokens]]:
        """Moves waiting samples into free rows, and draws their first tokens."""
        ended: list[tuple[int, int, SampledTokens]] = []
        begun = 0
        prompts: Counter[str | None] = Counter()  # client -> number of prompts read only for log-probs
        while self._waiting and (room := self._max_rows - len(self._rows)) > 0:
            if may_begin is not None and (room := min(room, may_begin - begun)) <= 0:
                break
            share = self._bring_forward(room, prompts)
            if not self._waiting[0].cached:
                self._read_next_prompts(room)
            request = self._waiting[0]
            assert request.logits is not None
            begins = request.samples[:share]
            begun += max(1, len(begins))
            prompts[request.client] += not begins
            request.samples = request.samples[len(begins) :]
            if not request.samples:
                self._waiting.popleft()
            if not begins:  # only the prompt's log-probs were requested
                continue
            first = len(self._rows)
            self._cache.append(request.cached, len(begins))
            self._rows += begins
            self._last += [0] * len(begins)
            for sample in begins:
                sample.add_experts(request.experts)
            ended += self._draw(begins, request.logits.expand(len(begins), -1), first_row=first)
        return ended

    def _bring_forward(self, room: int, prompts: Counter[str | None]) -> int:
        """Moves a request of the client with the fewest rows to the front; returns how many rows the request may get.

        Args:
            room: the number of free rows.
            prompts: client -> number of prompts read only for their log-probs, which count as rows.
        """
        clients = dict.fromkeys(request.client for request in self._waiting)
        if len(clients) == 1:
            return room
        rows = prompts + Counter(sample.client for sample in self._rows)
        chosen = min(clients, key=rows.__getitem__)  # of equal clients, the one that has waited longest
        request = next(candidate for candidate in self._waiting if candidate.client == chosen)
        self._waiting.remove(request)
        self._waiting.appendleft(request)
        return max(1, room // len(clients))

    def _read_next_prompts(self, free: int) -> None:
        """Reads waiting prompts as one pack: as many as the free rows need and the token budget allows."""
        requests: list[_Request] = []
        rows = tokens = 0
        for request in self._waiting:
            if request.cached:  # read before, and now waiting for a row
                rows += max(1, len(request.samples))
                continue
            tokens += len(request.context)
            if requests and (rows >= free or tokens > self._prompt_tokens):
                break
            requests.append(request)
            rows += max(1, len(request.samples))
        device = next(self._policy.parameters()).device
        lengths = [len(request.context) for request in requests]
        ends = np.cumsum(lengths).tolist()
        starts = [end - length for end, length in zip(ends, lengths, strict=True)]
        attention = PromptAttention(self._policy.attention.for_pack(zigzag_layout([0, *ends], 1), device))
        hidden = self._policy.hidden_states(
            torch.tensor([token for request in requests for token in request.context], device=device),
            torch.cat([torch.arange(length) for length in lengths]).to(device),
            attention,
        )
        require_layers(attention.layers, self._policy.hf.config.num_hidden_layers, type(self._policy.hf).__name__)
        experts = self._experts()
        logits = self._logits(hidden[torch.tensor(ends, device=device) - 1])
        for request, start, end, row in zip(requests, starts, ends, logits, strict=True):
            request.cached = [(keys[start:end], values[start:end]) for keys, values in attention.layers]
            request.logits = row
            request.experts = None if experts is None else experts[start:end]
            if request.wants_prompt_log_probs:
                request.wants_prompt_log_probs = False
                log_probs = self._prompt_log_probs_of(request, hidden[start:end])
                k = request.prompt_top_k
                top = self._top_tokens(hidden[start : end - 1], k) if k else None
                self._read_prompts.append((request.number, log_probs, top))

    def _experts(self) -> np.ndarray | None:
        """Returns the experts of the last pass, int16 [tokens, layers, experts of a token], if they are recorded."""
        if not self._records_experts:
            return None
        routing = self._policy.routing
        assert routing is not None
        _, chosen = routing.chosen(torch.zeros(0, dtype=torch.int64))
        unknown = torch.full_like(next(iter(chosen.values())), UNKNOWN_EXPERT)
        layers = [chosen.get(layer, unknown) for layer in range(routing.num_layers)]
        return torch.stack(layers, 1).to("cpu", torch.int16).numpy()

    def _prompt_log_probs_of(self, request: _Request, hidden: torch.Tensor) -> np.ndarray:
        """Returns log-probs [prompt tokens], bit-equal to the trainer's; hidden: [prompt tokens, hidden_dim]."""
        inputs = self._policy.head_inputs_of(hidden[:-1])
        targets = torch.tensor(request.context[1:], dtype=torch.int64, device=hidden.device)
        log_probs, _ = token_log_probs(inputs, targets)
        require_finite(int(log_probs.isnan().sum()), len(log_probs))
        return torch.cat([log_probs.new_full((1,), torch.nan), log_probs]).cpu().numpy()

    def _top_tokens(self, hidden: torch.Tensor, k: int) -> TopTokens:
        """Returns the k most likely next tokens for [rows, hidden_dim]; computes few rows of logits at a time."""
        tops = [self._logits(rows).log_softmax(-1).topk(k) for rows in hidden.split(_TOP_ROWS)]
        if not tops:
            return TopTokens(np.zeros((0, k), np.int64), np.zeros((0, k), np.float32))
        tokens, log_probs = torch.cat([top.indices for top in tops]), torch.cat([top.values for top in tops])
        return TopTokens(tokens.cpu().numpy(), log_probs.cpu().numpy())

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns logits [rows, vocab] for hidden states [rows, hidden_dim], in float32 or wider."""
        logits: torch.Tensor = self._policy.hf.get_output_embeddings()(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self._policy.softcap is not None:
            logits = logits.div_(self._policy.softcap).tanh_().mul_(self._policy.softcap)
        return logits

    def _draw(
        self, samples: Sequence[_Sample], logits: torch.Tensor, *, first_row: int
    ) -> list[tuple[int, int, SampledTokens]]:
        """Draws a token for each of these consecutive rows; removes rows whose samples end, and returns the samples."""
        tokens, log_probs = draw(
            logits,
            temperature=[sample.params.temperature for sample in samples],
            # a negative number chooses the most likely token
            numbers=[-1.0 if sample.params.greedy else sample.next_number() for sample in samples],
            tempered=[sample.params.tempered for sample in samples],
            top_k=[sample.params.top_k for sample in samples],
            top_p=[sample.params.top_p for sample in samples],
            min_p=[sample.params.min_p for sample in samples],
            renormalized=[sample.params.renormalized for sample in samples],
        )
        self.tokens_drawn += len(tokens)
        ended, gone = [], []
        for row, (sample, token, log_prob) in enumerate(zip(samples, tokens, log_probs, strict=True), first_row):
            sample.add(token, log_prob, self._version)
            self._last[row] = token
            finished = token in sample.params.end_token_ids or self._completes_a_stop(sample)
            if finished or len(sample.tokens) == sample.params.max_new_tokens:
                ended.append(sample.completion("stop" if finished else "length"))
                gone.append(row)
        if gone:
            self._remove(gone)
        return ended

    def _completes_a_stop(self, sample: _Sample) -> bool:
        """Returns whether the last token has completed a stop text, given that earlier tokens have not."""
        if not sample.params.stop:
            return False
        assert self._decode is not None
        # a character takes at most four tokens of one byte each, and the last token may add several characters
        tail = 4 * max(map(len, sample.params.stop)) + 4
        text = self._decode(sample.tokens[-tail:])
        return any(stop in text for stop in sample.params.stop)

    def _remove(self, rows: Sequence[int]) -> None:
        sources = self._cache.remove(rows)
        self._rows = [self._rows[row] for row in sources]
        self._last = [self._last[row] for row in sources]


def sample(
    policy: PolicyModel,
    prompts: Mapping[int, Sequence[int]],
    samples_per_prompt: int,
    params: SamplingParams,
    *,
    max_rows: int = 256,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> list[tuple[int, SampledTokens]]:
    """Draws several completions of each prompt; returns (index of the prompt, completion), grouped by prompt, in order.

    The same weights and arguments give the same completions. The draws for a prompt depend on the prompt's index. Other
    prompts and `max_rows` only change the rounding of its probabilities.

    Args:
        prompts: index -> token ids; the index is appended to `params.seed` to seed the draws.

    Raises:
        BatchError: a prompt has no tokens. ModelError, StateError: as in `Sampler`.
    """
    sampler = Sampler(policy, max_rows=max_rows, decode=decode)
    prompt_indices = list(prompts)
    for prompt_index, prompt in prompts.items():
        sampler.add(prompt, samples_per_prompt, replace(params, seed=(*params.seed, prompt_index)))
    completions: dict[tuple[int, int], SampledTokens] = {}
    while not sampler.is_idle:
        for request, index, completion in sampler.step():
            completions[request, index] = completion
    return [(prompt_indices[request], completions[request, index]) for request, index in sorted(completions)]


def _generator(seed: Sequence[int], index: int) -> np.random.Generator:
    # numpy seeds [3] and [3, 0] equally, so the length is included
    words = [len(seed), *seed, index]
    if max(words) > _LARGEST_WORD:  # numpy joins 32-bit words of all numbers; bit lengths keep seeds distinct
        words = [_LARGEST_WORD, len(seed), *(number.bit_length() for number in seed), *seed, index]
    return np.random.Generator(np.random.PCG64(words))
