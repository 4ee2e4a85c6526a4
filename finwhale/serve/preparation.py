"""From a plan to what an engine serves: sampling options, a grammar, readers of the answer.

A `Plan` (finwhale/serve/planning.py) holds plain values; this file adds the objects that cannot
travel between processes. It starts nothing. A newcomer's mistake: taking `is_thinking` for "the
answer begins with reasoning"; a prefix may have ended it, so the last tag of the prompt decides
(`is_reasoning`). Source: spec/multimodal-serving.md sections B.2 to B.7.
"""

from __future__ import annotations

from dataclasses import dataclass

from finwhale.config.server import ServerConfig
from finwhale.engine.request import Constraint, RequestError, SamplingParams
from finwhale.serve.errors import InvalidRequestError, OverloadedError
from finwhale.serve.generation import ChatReader, ChoiceReader, TextReader
from finwhale.serve.output_constraints import call_constraint, format_constraint
from finwhale.serve.planning import ChatRequest, CompletionRequest, Plan, Planner, refusal
from finwhale.text.grammar import GrammarError
from finwhale.text.grammar_trial import TrialLostError
from finwhale.text.output_parser import OutputParser
from finwhale.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What the engine is given, and who reads its answer.

    readers  one for each choice
    echo     prompt ids that are repeated in the answer, without a begin marker that was added
    notes    what is served otherwise than asked, in words for the client
    """

    prompt: list[int]
    params: SamplingParams
    readers: list[ChoiceReader]
    echo: list[int] | None = None
    notes: tuple[str, ...] = ()


class Preparer:
    """Prepares requests to one model; its methods may run in any thread.

    vocab_size      rows of the model's head, V
    context_tokens  prompt and answer together, at most
    """

    def __init__(
        self, tokenizer: Tokenizer, config: ServerConfig, *, vocab_size: int, context_tokens: int
    ) -> None:
        """Keep what every request needs."""
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self.planner = Planner(tokenizer, config, context_tokens=context_tokens)

    @property
    def context_tokens(self) -> int:
        """Prompt and answer together, at most."""
        return self.planner.context_tokens

    def chat(self, request: ChatRequest) -> Prepared:
        """Return a chat prepared; raise InvalidRequestError for what could not be served."""
        return self.prepared(self.planner.chat(request))

    def text(self, request: CompletionRequest) -> Prepared:
        """Return a completion prepared; raise InvalidRequestError as `chat` does."""
        return self.prepared(self.planner.text(request))

    def prepared(self, plan: Plan, *, trials_until_s: float | None = None) -> Prepared:
        """Return what the engine is given for a plan; raise InvalidRequestError as `chat` does.

        trials_until_s  of time.monotonic; costly grammars are tried until then, at 0 never

        Raises OverloadedError where this machine cannot try a grammar, TrialLateError behind
        `trials_until_s`.
        """
        try:
            return self._prepared(plan, trials_until_s)
        except TrialLostError as error:
            raise OverloadedError(
                f"{error}; try again later", code="grammars_unavailable", retry_after_s=1
            ) from None
        except (RequestError, GrammarError) as error:
            raise refusal(error) from None
        except ModuleNotFoundError as error:
            raise InvalidRequestError(str(error), code="not_installed") from None
        except RecursionError:
            raise InvalidRequestError("the body is nested too deeply; flatten it") from None

    def _prepared(self, plan: Plan, trials_until_s: float | None) -> Prepared:
        constraint, loose = self._constraint(plan, trials_until_s)
        params = self._params(plan, constraint)
        readers = [self._reader(plan, constraint) for _ in range(params.n)]
        prompt = plan.prompt.tolist()
        return Prepared(
            prompt=prompt,
            params=params,
            readers=readers,
            echo=prompt[len(prompt) - plan.echo :] if plan.echo else None,
            notes=(*plan.notes, *loose),
        )

    def _constraint(
        self, plan: Plan, trials_until_s: float | None
    ) -> tuple[Constraint | None, tuple[str, ...]]:
        """Return the constraint of the answer, and sentences on what it leaves loose."""
        if plan.must_call:
            return call_constraint(
                self.tokenizer,
                plan.must_call,
                parallel=plan.max_calls is None,
                vocab_size=self.vocab_size,
                owner=plan.tenant,
                deadline_s=trials_until_s,
            )
        if plan.may_call:
            return None, ()
        constraint = format_constraint(
            self.tokenizer,
            plan.response_format,
            vocab_size=self.vocab_size,
            prefix=plan.prompt[len(plan.prompt) - plan.num_prefix :].tolist(),
            is_reasoning=plan.is_reasoning,
            owner=plan.tenant,
            deadline_s=trials_until_s,
        )
        return constraint, ()

    def _reader(self, plan: Plan, constraint: Constraint | None) -> ChoiceReader:
        stop = plan.sampling.stop
        if not plan.reads_chat:
            return TextReader(self.tokenizer, stop)
        kind = (plan.response_format or {}).get("type")
        parser = OutputParser(
            thinking=plan.is_reasoning,
            tools_declared=plan.may_call,
            stop=stop,
            # A grammar leaves no prose to blank out, and allows values other than { and [.
            json_mode=kind in ("json_object", "json_schema") and constraint is None,
            starts_in_calls=bool(plan.must_call),
            max_calls=plan.max_calls,
        )
        return ChatReader(self.tokenizer, parser)

    def _params(self, plan: Plan, constraint: Constraint | None) -> SamplingParams:
        sampling = plan.sampling
        if sampling.max_tokens is None or sampling.temperature is None or sampling.top_p is None:
            raise ValueError("plan: max_tokens, temperature and top_p are settled by the planner")
        wants_told = plan.echo and sampling.logprobs
        return SamplingParams(
            max_new_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            stop_ids=(self.tokenizer.eos_id,),
            logprobs=sampling.logprobs,
            top_logprobs=sampling.top_logprobs,
            prompt_logprobs=sampling.top_logprobs if wants_told else None,
            n=sampling.n,
            logit_bias=sampling.logit_bias,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            constraint=constraint,
        )
