"""What fits together: an objective with the teachers' scores, the temperature, candidate sets, streams and attention.

Said by `mopd check` and every launch before a weight is loaded. What cannot be had exactly is refused, with what could
(METHOD section 3, "What fits together").
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from mopd.config import Config
from mopd.losses.objectives import OBJECTIVES, Objective, takes_candidates
from mopd.sampling.vllm_weights import transfer_errors

WHOLE = frozenset({"full", "hidden"})  # either of them says a whole distribution


def misfits(config: Config, objective: Objective, gives: Mapping[str, Collection[str]]) -> list[str]:
    """Errors, each beginning with its key; none where all fits.

    objective   what make_objective made of train.objective
    gives       teacher id -> what its back end can deliver ("sampled", "top_k", "full", "hidden")
    """
    return [*_score_errors(config, objective, gives), *_temperature_errors(config), *_option_errors(config, objective),
            *_attention_errors(config), *_routing_errors(config), *transfer_errors(config)]


def _score_errors(config: Config, objective: Objective, gives: Mapping[str, Collection[str]]) -> list[str]:
    """Teachers whose scores do not say enough for the objective, or for the mixture that they are part of."""
    train, errors = config.train, []
    truncated, top_k = train.top_p < 1 or train.top_k > 0, getattr(objective, "top_k", 0)
    for name, domain in config.domains.items():
        serving = list(domain.teacher_weights) or [domain.teacher]
        strangers = [t for t in serving if t in config.teachers and config.teachers[t].cross_tokenizer]
        errors += _stranger_errors(config, objective, name, strangers, mixed=len(serving) > 1)
        gives = {t: given for t, given in gives.items() if t not in strangers}
        few = [t for t in serving if t in gives and not WHOLE & set(gives[t])]
        lacking = ", ".join(f"'{t}'" for t in few)
        if not lacking:
            continue
        say = "the sampled token's score alone"
        likeliest = all("top_k" in gives[t] for t in few)
        if objective.needs == "full" and not (top_k and likeliest):
            say_more = "the sampled token's score and its likeliest ids" if likeliest else say
            errors.append(f"train.objective: {train.objective} compares whole distributions, and teacher {lacking} of domain "
                          f"{name} gives {say_more}; take mopd or sampled_kl" + (
                              ", forward_kl with train.objective_options={support: top_k, k: 20}" if likeliest
                              and len(serving) == 1 else "") + ", or a teacher in this process")
        elif objective.needs == "full" and len(serving) > 1:
            errors.append(f"domains.{name}.teacher_weights: the likeliest ids of a mixture are not those of its teachers, "
                          f"and teacher {lacking} tells no more than its own; take mopd or sampled_kl, one teacher for this "
                          "domain, or teachers in this process")
        if len(serving) > 1 and domain.teacher_mixture == "log_space":
            errors.append(f"domains.{name}.teacher_mixture: log_space needs every teacher's whole distribution (its "
                          f"normalisation is a sum over all ids), and teacher {lacking} gives {say}; take probability, or "
                          "teachers in this process")
        if truncated and (objective.needs == "sampled" or top_k):
            errors.append(f"train.top_p: under top-p or top-k scores are renormalised over each token's candidates, and "
                          f"teacher {lacking} of domain {name} gives {say}; take train.top_p=1 and train.top_k=0, or a "
                          "teacher in this process")
    return errors


def _temperature_errors(config: Config) -> list[str]:
    """Teachers whose scores are those at temperature 1 in a run that compares at another one."""
    at = config.train.objective_options.get("temperature", config.train.temperature)
    if at == 1:
        return []
    used = {t for domain in config.domains.values() for t in (domain.teacher_weights or (domain.teacher,))}
    return [f"train.temperature: teacher '{name}' (teachers.{name}.backend={teacher.backend}) scores at temperature 1 only, "
            f"since prompt log-probabilities ignore it, and this run compares at {at:g}; take train.temperature=1 (and no "
            f"other train.objective_options.temperature), or teachers.{name}.backend=hf"
            for name, teacher in config.teachers.items()
            if name in used and teacher.backend != "hf" and not teacher.cross_tokenizer]


def _stranger_errors(config: Config, objective: Objective, domain: str, strangers: Collection[str], *, mixed: bool
                     ) -> list[str]:
    """What cannot be asked of teachers with another tokenizer (`strangers`, those of one domain)."""
    if not strangers:
        return []
    train, errors = config.train, []
    who = f"teacher {', '.join(map(repr, strangers))} of domain {domain}"
    key = f"teachers.{strangers[0]}.cross_tokenizer"
    instead = f"or a teacher with the student's tokenizer and no {key}"
    at = train.objective_options.get("temperature", train.temperature)
    if objective.needs == "full":
        errors.append(f"train.objective: {train.objective} compares distributions over one vocabulary, and {who} has another "
                      f"({key}): it scores sampled tokens alone, by spans of text; take mopd or sampled_kl, {instead}")
    if at != 1 or train.temperature != 1:
        errors.append(f"train.temperature: {who} splits texts otherwise, and at a temperature other than 1 the probability "
                      f"of a text depends on how it is split; take train.temperature=1, {instead}")
    if train.top_p < 1 or train.top_k > 0:
        errors.append(f"train.top_p: scores are renormalised over each token's candidates under top-p or top-k, and {who} "
                      f"knows no such tokens; take train.top_p=1 and train.top_k=0, {instead}")
    if mixed:
        errors.append(f"domains.{domain}.teacher_weights: a mixture is one of distributions over the same tokens, and {who} "
                      f"has others; give each domain one teacher, {instead}")
    return errors


def _option_errors(config: Config, objective: Objective) -> list[str]:
    """Options that contradict each other, or would train nothing."""
    train, errors = config.train, []
    options, built_in = train.objective_options, train.objective in OBJECTIVES
    at = options.get("temperature", train.temperature)
    if built_in and objective.needs == "sampled" and at != train.temperature:
        errors.append(f"train.objective_options.temperature: tokens are sampled at train.temperature={train.temperature:g}, "
                      f"and {train.objective} weighs them by their probability at {at:g}, under which they were not drawn; "
                      "leave this option out")
    if built_in and objective.needs == "sampled" and train.demonstration_fraction > 0:
        errors.append(f"train.demonstration_fraction: {train.demonstration_fraction:g} trains on stored turns, which the "
                      f"student did not sample, and {train.objective} is an average over its own samples; take reverse_kl, "
                      "forward_kl or jsd, or 0")
    if options.get("support") == "top_k" and options.get("tail") == "renormalise" and options.get("k") == 1 \
            and train.objective in ("reverse_kl", "forward_kl"):
        errors.append("train.objective_options.k: renormalised over one id both models give it probability 1, so the loss is "
                      "always 0; take a larger k or tail=bucket")
    if built_in and "tail" in options and options.get("support", "full") != "top_k":
        errors.append(f"train.objective_options.tail: {options['tail']} has no meaning on full support, where no tail is; "
                      "set support: top_k and k, or leave tail out")
    if (train.top_p < 1 or train.top_k > 0) and objective.needs == "sampled" and not takes_candidates(objective):
        errors.append(f"train.objective: {train.objective} takes no `candidates`, but under top-p or top-k tokens are "
                      "sampled from candidate sets; give its __call__ that parameter, or take train.top_p=1 and "
                      "train.top_k=0")
    return errors


def _routing_errors(config: Config) -> list[str]:
    """Routing replay of a student that has no routes."""
    if not config.train.routing_replay:
        return []
    from transformers import AutoConfig

    from mopd.learner.routing import CannotReplay, moe_layers

    try:
        moe_layers(AutoConfig.from_pretrained(config.student.model, trust_remote_code=config.student.trust_remote_code))
    except CannotReplay as error:
        return [f"train.routing_replay: {error}"]
    except (OSError, ValueError):
        return []  # a model that cannot be read is said elsewhere
    return []


def _attention_errors(config: Config) -> list[str]:
    """What FlexAttention cannot do."""
    if config.student.attention != "flex_attention":
        return []
    errors = []
    if not torch.cuda.is_available():
        errors.append("student.attention: flex_attention has no backward pass on a CPU, and no GPU is seen here; take auto")
    if config.train.prefix_gradient == "none":
        errors.append("student.attention: flex_attention takes no prefix that was computed before; take auto, or "
                      "train.prefix_gradient=full")
    return errors
