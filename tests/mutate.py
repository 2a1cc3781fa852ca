"""Known mistakes, made one at a time in a copy of the tree: do the tests notice?

    make mutate                          all of them; writes tests/mutations.md
    .venv/bin/python tests/mutate.py --new         those that are not in tests/mutations.md yet; adds them there
    .venv/bin/python tests/mutate.py late state    those whose description has all of these words; writes nothing

Ends with 1 if a mistake survives, or if the text that it replaces is not there exactly once.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "mutations.md"
SECONDS = 600

# What to run for mistakes in a module, the test files that are likeliest to notice first.
TESTS = {
    "objective": ("agent",),
    "agent": ("agent", "graphs"),
    "network": ("network", "time_axis", "agent"),
    "lstm": ("lstm", "lstm_triton"),
    "lstm_triton": ("lstm_triton",),
    "stem_triton": ("stem_triton",),
    "encoders": ("encoders", "stem_triton"),
    "replay": ("replay", "time_axis"),
    "collect": ("time_axis", "collect", "resume"),
    "evaluate": ("collect",),
    "graphs": ("graphs",),
    "train": ("train", "resume"),
    "config": ("config",),
    "envs/gymnasium": ("envs_gymnasium", "collect", "resume"),
    "run/chunks": ("chunks",),
    "envs/spaces": ("spaces",),
    "envs/atari": ("envs_atari",),
}

# module: [(the mistake, the text that is there exactly once, what stands there instead), ...]
MISTAKES = {
    "collect": [
        ("late state: H stored after o_t", "self.reset, before.core, action", "self.reset, after.core, action"),
        (
            "a run goes on without the frames before",
            'self.obs, self.inputs.stacks.frames = _parts(arrays, "obs."), _parts(arrays, "frames.")',
            'self.obs = _parts(arrays, "obs.")',
        ),
        (
            "new episodes are taken for the old ones' next step",
            "self.replay.add(everyone, self.obs, self.reset, self.state.core, none, none.astype(np.float32), no, no)",
            "everyone[:0]",
        ),
        (
            "the actor's previous action never moves on",
            "= stepped.obs, action, reward, after",
            "= stepped.obs, self.prev_action, reward, after",
        ),
        (
            "the actor's previous reward never moves on",
            "= stepped.obs, action, reward, after",
            "= stepped.obs, action, self.prev_reward, after",
        ),
        (
            "the fake transition of an autoreset is counted",
            "self.agent_steps += int(self.valid.sum())",
            "self.agent_steps += len(self.valid)",
        ),
        ("the fake transition of an autoreset is stored", "= ~self.valid, ~ended", "= ~self.valid, np.ones_like(ended)"),
        ("a truncated episode is stored as a terminated one", "terminal = stepped.terminated & self.valid", "terminal = ended"),
        ("scores count what was learned from", "np.where(self.valid, stepped.paid, 0)", "reward"),
        ("SAME_STEP: last observation of the wrong environment", "{name: array[envs] for", "{name: array[: len(envs)] for"),
        (
            "SAME_STEP: state of the step before with the last observation",
            "stepped.final_obs, after)",
            "stepped.final_obs, before)",
        ),
        (
            "SAME_STEP: the next episode opens without a reset",
            "= ended, np.ones_like(ended)",
            "= np.zeros_like(ended), np.ones_like(ended)",
        ),
        (
            "SAME_STEP: a last observation counts as a transition",
            "after.core[torch.from_numpy(envs)], none, none.astype(np.float32), no, no)",
            "after.core[torch.from_numpy(envs)], none, none.astype(np.float32), no, ~no)",
        ),
        ("the actor's frame stack runs across resets", "            old[reset] = 0\n", ""),
        ("scores run on into the next episode", "self.score[ended], self.length[ended] = 0, 0", "self.length[ended] = 0"),
        ("lengths count the reset", "self.length += self.valid", "self.length += 1"),
        ("undeclared rewards pass", "        if not known.all():", "        if False:"),
    ],
    "replay": [
        ("previous action unshifted", "self.action[before]", "self.action[at]"),
        ("previous reward unshifted", "self.reward[before]", "self.reward[at]"),
        ("state of the slot after", "self.core_in[at[0][0], env]", "self.core_in[at[0][1], env]"),
        ("windows look back on overwritten slots", "self.count - self.slots + behind, 0)", "self.count - self.slots, 0)"),
        ("windows cross the write head", "self.count - length - self.oldest(), 0)", "self.count - length + 1 - self.oldest(), 0)"),
        ("one write head for all environments", "self.count[envs] += 1", "self.count += 1"),
        ("windows of the wrong environment", 'side="right"', 'side="left"'),
        ("frame stack across resets", "same = later_open == 0", "same = later_open >= 0"),
        ("frame stack newest first", "torch.arange(self.frame_stack - 1, -1, -1,", "torch.arange(0, self.frame_stack,"),
        ("packed: frames of another episode", "[frames] * same[..., None]", "[frames]"),
        ("packed: frames and rows change places", "unflatten(-1, ring.shape[2:])", "unflatten(-1, ring.shape[2:]).flip(2)"),
        ("returns run across truncations", "goes_on = self.valid[at] & ~self.terminal[at]", "goes_on = ~self.terminal[at]"),
        ("returns without discount", "discount * goes_on.to(exact)", "goes_on.to(exact)"),
        ("returns skip steps", "span *= 2", "span *= 4"),
        ("Var(G) counts the unfinished tail", "has_end | (length - row >= horizon)", "torch.ones_like(has_end)"),
        (
            "Var(G) only counts what lies far from the tip",
            "has_end | (length - row >= horizon)",
            "(length - row >= horizon).expand_as(has_end)",
        ),
        ("the rewards' scale counts empty slots", "self.reward[self.valid]", "self.reward.flatten()"),
    ],
    "lstm": [
        ("reset ignored", "h, c = h * kept, c * kept", "h, c = h * 1, c * 1"),
        ("reset wipes c only", "h, c = h * kept, c * kept", "h, c = h * 1, c * kept"),
        ("reset after the step", "keep = (~reset)", "keep = (~reset.roll(1, 0))"),
        ("input and forget gate swapped", "i, f, z, o =", "f, i, z, o ="),
        ("bias of 1 on the input gate", "block)[:, 1] = 1.0", "block)[:, 0] = 1.0"),
        ("forced kernels are not taken", 'return self.implementation == "triton"', "return False"),
        ("kernels whatever the sizes", "return fits(self.recurrent.shape[1], dtype)", "return True"),
    ],
    "lstm_triton": [
        ("reset ignored", "h, c = h * keep, c * keep", "h, c = h * 1, c * 1"),
        ("reset wipes c only", "h, c = h * keep, c * keep", "h, c = h * 1, c * keep"),
        (
            "reset after the step",
            "h, c = h * keep, c * keep",
            "keep = 1 - tl.load(reset + slot - batch, mask=real & (t > 0), other=0).to(tl.float32)\n        h, c = h * keep, c * keep",
        ),
        (
            "recurrent matrix transposed",
            "matrix = recurrent + (first + tl.arange(0, BLOCK)[:, None]) * 4 * BLOCK + unit",
            "matrix = recurrent + (first + unit) * 4 * BLOCK + tl.arange(0, BLOCK)[:, None] ",
        ),
        (
            "recurrent matrix not transposed on the way back",
            "matrix = recurrent + (first + unit) * 4 * BLOCK + tl.arange(0, BLOCK)[:, None]",
            "matrix = recurrent + (first + tl.arange(0, BLOCK)[:, None]) * 4 * BLOCK + unit",
        ),
        ("no gradient of the forget gate", "d_f = (dc * before", "d_f = (0 * before"),
        ("gradient of the forget gate without its slope", "before * keep * f * (1 - f))", "before * keep)"),
        ("gradient of the forget gate through a reset", "before * keep * f", "before * f"),
        ("gradient of h through a reset", "product(d_o, from_o)) * keep", "product(d_o, from_o))"),
        ("gradient of c through a reset", "dc = dc * f * keep", "dc = dc * f"),
        ("gradient of h lacks a gate", " + product(d_f, from_f)", ""),
        ("gradient of c without the slope of tanh", "dc += dh * o * (1 - squashed * squashed)", "dc += dh * o"),
        ("gradient of the state after is lost", "dh = tl.load(d_after + h_place,", "dh = 0 * tl.load(d_after + h_place,"),
        ("cells a step late on the way back", "cells + (steps * batch + row)", "cells + ((steps - 1) * batch + row)"),
        ("recurrent gradient from h after the step", "tl.store(masked + place, operand,", "tl.store(masked + place, h,"),
        ("cell in 16 bits", "c = f * c + i * z", "c = (f * c + i * z).to(to_i.dtype).to(tl.float32)"),
        ("kernels without a gradient where it is wanted", "any(x.requires_grad for x in inputs)", "False"),
        ("strides forgotten", "state.contiguous()", "state"),
    ],
    "network": [
        (
            "reset ignored for the action before",
            "inputs.prev_action.masked_fill(inputs.reset, self.sizes.num_actions)",
            "inputs.prev_action",
        ),
        ("reset ignored for the reward before", ".masked_fill(inputs.reset, len(self.sizes.reward_classes))", ""),
        ("reset ignored for the general reward before", "inputs.prev_reward.masked_fill(inputs.reset, 0.0)", "inputs.prev_reward"),
        (
            "one table for the action before and the action taken",
            "self.next_action(action)], -1)",
            "self.prev_action(action)], -1)",
        ),
        ("no residual around the LSTM", "self.norm(e + self.project(h))", "self.norm(self.project(h))"),
        (
            "outcomes lie as reward by observation",
            "(log_prior[..., :, None] + self.next_reward(ha).float().log_softmax(-1)[..., None, :])",
            "(log_prior[..., None, :] + self.next_reward(ha).float().log_softmax(-1)[..., :, None])",
        ),
        ("reward class by the signed difference", ".abs().argmin(-1)", ".argmin(-1)"),
        ("predictions are not normalised", "prediction = rms_norm(prediction)", "pass"),
        (
            "the target embedding knows the action",
            "return Trunk(x, features, core)",
            "return Trunk(self.embed(x, inputs), features, core)",
        ),
        ("the prior does not see the action", "self.prior(ha)", "self.prior(torch.cat([features, features], -1))"),
        (
            "the outcome heads start alike",
            "per_outcome)\n",
            "per_outcome)\n        self.prediction[-1].apply(lambda m: [nn.init.zeros_(p) for p in m.parameters()])\n",
        ),
    ],
    "stem_triton": [
        ("a tap of another row", "row + tap // 3 - 1, column + tap % 3 - 1", "row + tap // 3, column + tap % 3 - 1"),
        ("rows run into each other", "& (x >= 0) & (x < W)", ""),
        ("pictures run into each other", "& (y >= 0) & (y < H)", ""),
        ("bytes with a sign", "[None, None, :]) & 255", "[None, None, :])"),
        ("bytes in another order", "(8 * tl.arange(0, 4))[None, None, :]", "(24 - 8 * tl.arange(0, 4))[None, None, :]"),
        ("pooling sees the convolution's padding", "better = there & (value > best)", "better = value > best"),
        ("pooling sees rows behind the last", "there = (row >= 0) & (row < H)", "there = (row >= 0)"),
        ("the last of equal pixels wins", "(value > best)", "(value >= best)"),
        ("no scale", "other=0) * scale)", "other=0) * 1)"),
        ("no bias", "best + tl.load(bias + channel)", "best"),
        ("the gradient lacks the scale", "d_weight * ctx.scale", "d_weight"),
        ("the gradient goes to all nine", "tl.where(which == t, gradient.to(tl.float32), 0.0)", "gradient.to(tl.float32)"),
        ("one program's gradient only", "d_weight.sum(0)", "d_weight[0]"),
        ("no gradient of the bias", "word = tl.where(tap == 9, 1, word)", "word = tl.where(tap == 9, 0, word)"),
        ("one round only", "for turn in tl.range(rounds, num_stages=1):", "for turn in tl.range(1, num_stages=1):"),
    ],
    "encoders": [
        (
            "the stem's kernel whatever the pictures",
            "return fits(x.shape[1] * x.shape[2], len(self.layers[0].weight))",
            "return True",
        ),
        ("the stem's kernel is not taken", 'return self.stem == "triton"', "return False"),
        ("bytes in 16 bits are not scaled", "conv.weight * scale", "conv.weight * 1"),
        ("bytes in 16 bits lose the bias", "pooled + conv.bias.to(dtype)[:, None, None]", "pooled"),
        ("pictures of bytes are not scaled", "obs[name].float() * scale", "obs[name].float()"),
        (
            "residual blocks without their shortcut",
            "return x + self.factor * self.branch(x)",
            "return self.factor * self.branch(x)",
        ),
        (
            "each part of an observation is normalised by itself",
            "return rms_norm(sum(embeddings[1:], start=embeddings[0]))",
            "return sum(map(rms_norm, embeddings[1:]), start=rms_norm(embeddings[0]))",
        ),
    ],
    "objective": [
        ("prior not detached in the luck", "log_prior.detach().exp()", "log_prior.exp()"),
        (
            "luck of the wrong sign",
            "((posterior - log_prior.detach().exp()) * raw_luck)",
            "((log_prior.detach().exp() - posterior) * raw_luck)",
        ),
        ("the farthest prediction wins", "distance.detach().argmin(-1)", "distance.detach().argmax(-1)"),
        ("eps_WTA not divided by |Z|", "* winner + eps_wta / distance.shape[-1]", "* winner + eps_wta"),
        (
            "a sum for the mean over the embedding",
            "ema_embedding.detach()[:, :, None]).square().mean(-1)",
            "ema_embedding.detach()[:, :, None]).square().sum(-1)",
        ),
        ("discount shifted", "+ decay[t] * backup", "+ decay[t - 1] * backup"),
        ("bootstrap one slot early", "backup = slow[t + 1]", "backup = slow[t]"),
        ("blocks end one slot early", "if (t + 1) % backup_steps == 0:", "if t % backup_steps == 0:"),
        (
            "the backup runs through an episode's end",
            "torch.where(real[t], rows[-1] if correct_skill else uncorrected, slow[t])",
            "rows[-1] if correct_skill else uncorrected",
        ),
        ("skill corrects the first action only", "rows[-1] if correct_skill else uncorrected", "uncorrected"),
        ("dae_starts ignored", 'if starts == "all":', "if True:"),
        ("valid mask ignored in the means", "return (x * mask).sum() / mask.sum().clamp_min(1)", "return x.mean()"),
        (
            "a mean for the expectation under the target policy",
            "mean = (policy.detach() * raw_adv).sum(-1)",
            "mean = raw_adv.mean(-1)",
        ),
        (
            "KL reversed",
            "(torch.xlogy(policy, policy) - policy * log_pi).sum(-1)",
            "(log_pi.exp() * (log_pi - policy.log())).sum(-1)",
        ),
        (
            "the temperature loss trains the advantages",
            "raw_adv.detach() / log_temperature.exp()",
            "raw_adv / log_temperature.exp()",
        ),
        ("log T with the wrong sign", "return log_temperature + beta_kl * kl", "return beta_kl * kl - log_temperature"),
        ("(1 - eps_WTA) missing in beta_V", "return (1 - eps_wta) / return_variance", "return 1 / return_variance"),
        ("no floor below Var(G)", "return_variance.clamp_min(floor)", "return_variance"),
    ],
    "agent": [
        ("gamma missing", "discount = c.discount * (~w", "discount = (~w"),
        ("a terminal bootstraps", "(~w.terminal[k:]).to(reward.dtype)", "torch.ones_like(reward)"),
        ("target policy from the online advantages", "obj.target_policy(ema_raw_adv, ", "obj.target_policy(raw_adv, "),
        (
            "target policy at the online temperature",
            "obj.target_policy(ema_raw_adv, self.ema_temperature)",
            "obj.target_policy(ema_raw_adv, self.log_temperature.exp())",
        ),
        ("q from the online x", "ema.embedding[k + 1 :]", "self.net.trunk(w.inputs, core).embedding[k + 1 :]"),
        ("x of the slot itself as its target", "ema.embedding[k + 1 :]", "ema.embedding[k:-1]"),
        ("the slow network is not used", "ema = self.ema.trunk(w.inputs, core)", "ema = self.net.trunk(w.inputs, core)"),
        ("luck not gated by eps_WTA", "luck = luck * luck_counts", "pass"),
        ("luck: < for <= at the cutoff", "s.eps_wta <= c.luck_from_eps_wta", "s.eps_wta < c.luck_from_eps_wta"),
        ("corrections=skill ignored", 'if c.corrections == "skill+luck" else', "if True else"),
        ("corrections=none ignored", 'correct_skill=c.corrections != "none"', "correct_skill=True"),
        (
            "reward class of the reward before",
            "obj.joint_posterior(posterior_o, self.net.reward_class(reward),",
            "obj.joint_posterior(posterior_o, self.net.reward_class(w.inputs.prev_reward[k:-1]),",
        ),
        (
            "burn-in one slot short",
            "self.net.trunk(w.inputs[:k], core).core",
            "self.net.trunk(w.inputs[: max(1, k - 1)], core).core",
        ),
        ("gradient through the burn-in", "torch.set_grad_enabled(c.burn_in_grad)", "torch.set_grad_enabled(True)"),
        ("stored states ignored", "core = w.core_in if c.stored_states else", "core = w.core_in if False else"),
        ("EMA decay swapped", "weight = 1 - self.learning.ema_decay", "weight = self.learning.ema_decay"),
        (
            "T not averaged",
            "self.ema_temperature.lerp_(self.log_temperature.exp(), weight)",
            "self.ema_temperature.copy_(self.log_temperature.exp())",
        ),
        (
            "log T averaged in place of T",
            "self.ema_temperature.lerp_(self.log_temperature.exp(), weight)",
            "self.ema_temperature.lerp_(self.log_temperature, weight)",
        ),
        ("gradients add up over updates", "        self.optimizer.zero_grad(set_to_none=True)\n", ""),
        (
            "Adam's decays swapped",
            "betas=(learning.adam_beta1, learning.adam_beta2)",
            "betas=(learning.adam_beta2, learning.adam_beta1)",
        ),
        ("the temperature's own learning rate ignored", "(1.0, self.learning.temperature_lr_multiplier)", "(1.0, 1.0)"),
        ("an actor's state that its graph writes over", "ActorState(*(tensor.clone() for tensor in after))", "ActorState(*after)"),
        ("epsilon-greedy the wrong way round", "rng.random(greedy.shape) < epsilon", "rng.random(greedy.shape) > epsilon"),
        (
            "the aligned actor forgets where episodes opened",
            "embeddings[1:], resets[1:])",
            "embeddings[1:], torch.zeros_like(resets[1:]))",
        ),
        ("the aligned actor carries its state on", "resets, torch.zeros_like(state.core))", "resets, state.core)"),
        ("a loaded agent keeps its own slow temperature", 'self.ema_temperature.copy_(state["ema_temperature"])', "pass"),
        ("a loaded agent keeps its own moments", "                    slot.zero_()\n", "                    pass\n"),
        (
            "loading moves the optimiser's state",
            "slots.setdefault(key, torch.zeros_like(like, device=self.device)).copy_(found)",
            "slots[key] = found.clone()",
        ),
    ],
    "graphs": [
        ("recorded anew at each call", "if key not in self.recorded:", "if True:"),
        ("arguments of the first call", "                place.copy_(arg)\n", "                pass\n"),
        ("arguments of the host from the first call", "known.parcel.send(a for a in args if _on_host(a))", "pass"),
        ("parcels overlap", "at += _aligned(size)", "at += 0"),
        ("no end of graphs", "len(self.recorded) >= MOST_SHAPES", "False"),
        ("recording is tried again and again", "        self.stream = None\n        self.recorded.clear()\n", ""),
        ("the reason is hidden", "error.__context__ or error", "error"),
    ],
    "train": [
        (
            "one update too many",
            "begun // learning.agent_steps_per_update - self.updates",
            "begun // learning.agent_steps_per_update + 1 - self.updates",
        ),
        (
            "updates from the first step on",
            "begun = self.agent_steps - learning.min_replay_agent_steps",
            "begun = self.agent_steps",
        ),
        ("a stop makes updates a step early", "if self.ended:  # not where", "if self.ended or self.stop:  # not where"),
        ("a run goes on with a new sampler", 'self.replay_rng.bit_generator.state = numbers["sampling"]', "pass"),
        ("a run goes on without the evaluation it owes", 'numbers["updates"], numbers["due"]', 'numbers["updates"], False'),
        (
            "a run goes on and measures Var(G) at once",
            'self._variance_due, self.eval_seconds = numbers["variance_due"], ',
            "self._variance_due, self.eval_seconds = 0, ",
        ),
        (
            "epsilon by updates",
            "epsilon = self.cfg.acting.epsilon(self.agent_steps, ",
            "epsilon = self.cfg.acting.epsilon(self.updates, ",
        ),
        (
            "an evaluation beside training has the weights of training",
            "player = self.agent.player if wait else self.snapshot()",
            "player = self.agent.player",
        ),
        (
            "the copy that is scored keeps its first weights",
            "torch._foreach_copy_(list(self._snapshot.net.parameters()), ",
            "(list(self._snapshot.net.parameters()), ",
        ),
        (
            "an evaluation that is not over is lost when the next falls due",
            "(self.running.finish() if due else not self.running.advance())",
            "not due and not self.running.advance()",
        ),
        ("eps_WTA by updates", "cfg.objective.eps_wta(now, total)", "cfg.objective.eps_wta(self.updates, total)"),
        ("Var(G) measured once", "self._variance_due = now + ", "self._variance_due = 10**9 + "),
        (
            "logging moves the sampler",
            "spread = np.linspace(0, self.replay.num_starts(k).sum() - 1, batch).astype(np.int64)",
            "spread = self.replay_rng.integers(0, self.replay.num_starts(k).sum(), batch)",
        ),
        ("one seed for acting and sampling", "np.random.default_rng(seeds.replay)", "np.random.default_rng()"),
        ("episodes are reported again", "episodes, self._episodes = self._episodes, []", "episodes = self._episodes"),
    ],
    "config": [
        ("schedules ramp from step 0", "share = (agent_step - before[0]) / (at - before[0])", "share = agent_step / at"),
        ("PyTorch's default for Adam's second decay", "adam_beta2: float = 0.95", "adam_beta2: float = 0.999"),
        ("the learning rate stays up", '_schedule("0:0, 100k:1.25e-4, end:1.25e-5")', '_schedule("0:0, 100k:1.25e-4")'),
    ],
    "evaluate": [
        (
            "evaluation ends with the first to finish",
            "running[which] = ~(stepped.terminated | stepped.truncated)",
            "running[:] = not (stepped.terminated | stepped.truncated).any()",
        ),
        ("evaluation forgets the state", "action, self.state = self.agent.act(", "action, _ = self.agent.act("),
        ("evaluation counts what was learned from", "score[which] += stepped.paid", "score[which] += stepped.reward"),
        ("evaluation resets at every step", "reward, np.zeros(len(action), bool)", "reward, np.ones(len(action), bool)"),
    ],
    "envs/gymnasium": [
        ("a journal keeps the last action only", "self._taken[e].append(action)", "self._taken[e][:] = [action]"),
        ("raw rewards of a vector are not looked for", 'for part in (info, info.get("final_info")):', "for part in ():"),
        ("SAME_STEP: the raw reward of a last step is lost", 'for part in (info, info.get("final_info")):', "for part in (info,):"),
        ("SAME_STEP: last observation in the wrong row", "rows[name][e] = array", "rows[name][0] = array"),
        ("DISABLED: the first observation is lost", "return Stepped(self._read(opened), reward", "return Stepped(obs, reward"),
        ("every episode has the first one's seed", "            self._episode[e] += 1\n", ""),
        ("raw rewards of a list of environments are lost", "np.array(truncated), raw_reward=paid)", "np.array(truncated))"),
        ("actions lose their offset", "self.envs[e], self.first_action + action)", "self.envs[e], action)"),
        (
            "all environments of a vector share a seed",
            "self.envs.reset(seed=self._seed)",
            "self.envs.reset(seed=[self._seed] * self.num_envs)",
        ),
    ],
    "envs/spaces": [
        ("four channels are taken for pixels", "shape[0] > 4", "shape[0] >= 4"),
        ("pictures transposed", "np.moveaxis(array, -1, -3)", "np.swapaxes(array, -1, -3)"),
        ("bounded vectors are not centred", "(array - leaf.bounds[0]) / leaf.bounds[1]", "array / leaf.bounds[1]"),
        ("choices lose their offset", "_one_hot(array - space.start,", "_one_hot(array,"),
    ],
    "run/chunks": [
        ("a save writes all of the ring again", "start = np.maximum(written, oldest)", "start = oldest"),
        ("chunks that are overwritten are kept", "if (np.array(chunk.last) > oldest).any()]", "if chunk.last]"),
        ("a chunk needs no digest", "or digest(path) != chunk.sha256", "or not chunk.sha256"),
        ("the counts of the chunk's first slots", "replay.count[:] = chunk.last", "replay.count[:] = chunk.first"),
    ],
    "envs/atari": [
        ("actions never stick", '"repeat_action_probability": protocol.sticky', '"repeat_action_probability": 0.0'),
        ("fire is pressed at reset", '"use_fire_reset": False', '"use_fire_reset": True'),
        ("no-ops at reset", '"noop_max": 0', '"noop_max": 30'),
        ("a life lost ends the episode", '"episodic_life": False', '"episodic_life": True'),
        ("raw rewards are clipped by the emulator", '"reward_clipping": False', '"reward_clipping": True'),
        ("no maximum of two frames", '"maxpool": True', '"maxpool": False'),
        ("stacks in place of pictures", '"stack_num": 1', '"stack_num": 4'),
        ("all actions are never given", '"full_action_space": protocol.full_actions', '"full_action_space": False'),
        ("emulators are seeded seed + i", "list(dict.fromkeys(drawn))[:num]", "[int(seed.entropy) + i for i in range(num)]"),
        ("one seed for all emulators", "list(dict.fromkeys(drawn))[:num]", "drawn[:1] * num"),
        ("seeds of 32 bits", "generate_state(2 * num) >> 1", "generate_state(2 * num)"),
        ("the clock's seed", "self.vector.reset(seed=seeds)", "self.vector.reset(seed=None)"),
        (
            "truncated is terminated",
            "astype(np.float32), terminated, self._cut,",
            "astype(np.float32), self._over, self._cut & False,",
        ),
        ("the vector is not told of a truncation", "if self._cut.any():", "if False:"),
        ("the limit counts over all episodes", "np.where(opens, 0, self._length + 1)", "self._length + 1"),
        ("rewards are not clipped", "np.clip(paid, -1, 1)", "np.clip(paid, -9e9, 9e9)"),
        ("scores are clipped", "self._cut, raw_reward=paid)", "self._cut, raw_reward=reward)"),
        ("evaluation: rows of other emulators", "np.asarray(stepped.paid[rows]", "np.asarray(stepped.paid[: len(rows)]"),
        ("evaluation: actions for other emulators", "sent[self._rows] = actions", "sent[: len(actions)] = actions"),
        ("the picture in colour is of another game", "self.screen.reset(seed=seeds)", "self.screen.reset(seed=None)"),
        ("one game tells the agent what it paid", "float(stepped.reward[0])", "float(stepped.paid[0])"),
        ("Gymnasium's own vectors are changed", "        metadata: dict[str, Any] = {}\n", "        pass\n"),
    ],
}


@dataclass(frozen=True)
class Mistake:
    """One of the above."""

    module: str
    what: str
    old: str
    new: str

    @property
    def path(self) -> Path:
        """From the root of a tree."""
        return Path("src", "dae", f"{self.module}.py")


def all_mistakes() -> list[Mistake]:
    """The whole list."""
    return [Mistake(module, *entry) for module, entries in MISTAKES.items() for entry in entries]


def copy_tree(to: Path) -> None:
    """What the tests need, and nothing that is built."""
    for part in ("src", "tests"):
        shutil.copytree(ROOT / part, to / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copy(ROOT / "pyproject.toml", to)


def first_failure(tree: Path, names: list[str]) -> str | None:
    """The first test that fails in that tree, or nothing."""
    env = os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    files = [f"tests/test_{name}.py" for name in names]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "-m",
        "not gpu",
        "--timeout",
        "100",
        *files,
    ]
    try:
        run = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"no end within {SECONDS} s"
    if run.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(.+?)(?: - |$)", run.stdout, re.MULTILINE)
    if found is None or run.returncode != 1:
        raise RuntimeError(f"pytest could not run:\n{run.stdout[-3000:]}{run.stderr[-3000:]}")
    return found[1]


def try_out(mistake: Mistake) -> str:
    """Who notices it: a test's name, SURVIVED, or why it could not be made."""
    text = (ROOT / mistake.path).read_text()
    if text.count(mistake.old) != 1:
        return f"DOES NOT APPLY: {mistake.old!r} occurs {text.count(mistake.old)} times"
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        (tree / mistake.path).write_text(text.replace(mistake.old, mistake.new))
        likely = list(TESTS[mistake.module])
        others = [name for name in dict.fromkeys(n for names in TESTS.values() for n in names) if name not in likely]
        try:
            return first_failure(tree, likely) or first_failure(tree, others) or "SURVIVED"
        except RuntimeError as error:
            return f"DOES NOT RUN: {error}"


def main() -> int:
    """Everything, two at a time."""
    new = sys.argv[1:] == ["--new"]
    wanted = [] if new else [word.lower() for word in sys.argv[1:]]
    known = read_table() if new else {}
    mistakes = [m for m in all_mistakes() if all(word in f"{m.module} {m.what}".lower() for word in wanted)]
    mistakes = [m for m in mistakes if row(m) not in known]
    start, found = time.monotonic(), {}
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder, ThreadPoolExecutor(2) as pool:
        copy_tree(Path(folder))
        names = list(dict.fromkeys(name for m in mistakes for name in TESTS[m.module]))
        already = pool.submit(first_failure, Path(folder), names).result()
        if already:
            print(f"without any mistake the tests fail already: {already}")
            return 1
        for mistake, by in zip(mistakes, pool.map(try_out, mistakes), strict=True):
            found[mistake] = by
            print(f"{mistake.module}: {mistake.what}: {by}", flush=True)
    escaped = [m for m, by in found.items() if by.startswith(("SURVIVED", "DOES NOT"))]
    print(f"{len(found) - len(escaped)} of {len(found)} mistakes caught, in {time.monotonic() - start:.0f} s")
    if not wanted:
        write_table({m: found.get(m) or known[row(m)] for m in all_mistakes()})
    return 1 if escaped else 0


def cell(text: str) -> str:
    """Of a Markdown table."""
    return text.splitlines()[0].replace("|", r"\|")


def row(m: Mistake) -> tuple[str, str]:
    """What names it in the table."""
    return f"`{m.module}.py`", cell(m.what)


def read_table() -> dict[tuple[str, str], str]:
    """Rows of tests/mutations.md: who noticed."""
    rows = [re.split(r"(?<!\\) *\| *", line) for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    return {(where, what): by.strip("`") for _, where, what, by, _ in rows}


def write_table(found: dict[Mistake, str]) -> None:
    """tests/mutations.md"""
    rows = [f"| {row(m)[0]} | {row(m)[1]} | `{cell(by)}` |" for m, by in found.items()]
    head = [
        "# Mistakes that the tests notice", "",
        "Each was made alone, in a copy of the tree; named is the first test that failed. Written by `make mutate`.", "",
        "| where | the mistake | caught by |", "|---|---|---|",
    ]  # fmt: skip
    TABLE.write_text("\n".join([*head, *rows]) + "\n")


if __name__ == "__main__":
    sys.exit(main())
