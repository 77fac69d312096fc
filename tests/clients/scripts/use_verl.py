"""verl: its rollout manager, agent loop and checkpoint engine drive rjax on the CPU.

The trainer's side is a worker of verl's that has arrays in place of a model, since verl trains on
no CPU. Ray is told of two GPUs, which nothing uses: verl places each replica on one.
"""

import asyncio
import json
import os
import pathlib
import sys
import tempfile
import urllib.request
from collections.abc import AsyncGenerator, Iterator
from typing import Any

os.environ["VERL_USE_EXTERNAL_MODULES"] = "rjax.integrations.verl"

import numpy as np
import ray
import torch
import verl
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file, save_file
from tasks import Asked, run
from verl.checkpoint_engine.base import (
    CheckpointEngine,
    CheckpointEngineManager,
    CheckpointEngineRegistry,
)
from verl.experimental.agent_loop import AgentLoopManager
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils import omega_conf_to_dataclass
from verl.utils.import_utils import import_external_libs
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerManager

from rjax import LLM, SamplingParams

LENGTH = 12
PROMPT = list(range(20, 60))
GREEDY = {"temperature": 0.0, "logprobs": True}
ENGINE = {"page_size": 8, "num_pages": 128, "warmup": "off"}


@CheckpointEngineRegistry.register("folder")
class FolderEngine(CheckpointEngine):
    """Sends weights of a step through a folder, where a device would use NCCL."""

    def __init__(self, bucket_size: int, folder: str, is_master: bool = False) -> None:
        self.folder = pathlib.Path(folder)

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(cls, actors: int, rollouts: int, metadata: list[dict]) -> Any:
        return {"ranks": [0] * actors}, {"ranks": [0] * rollouts}

    def init_process_group(self, **kwargs: Any) -> None:
        pass

    def finalize(self) -> None:
        pass

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        for number, (name, tensor) in enumerate(weights):
            torch.save((name, tensor), self.folder / "part")
            os.rename(self.folder / "part", self.folder / f"{global_steps}-{number}")
        torch.save(None, self.folder / "part")
        os.rename(self.folder / "part", self.folder / f"{global_steps}-{number + 1}")

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[Any]:
        shared, number = torch.zeros(2**18), 0
        while True:
            path = self.folder / f"{global_steps}-{number}"
            while not path.exists():
                await asyncio.sleep(0.01)
            found = torch.load(path)
            if found is None:
                return
            name, tensor = found  # the memory of one tensor is that of the next
            part = shared[: tensor.numel()].view(tensor.shape)
            part.copy_(tensor)
            yield name, part
            shared.fill_(float("nan"))
            number += 1


class Trainer(Worker):
    """A worker of verl's that has a checkpoint's arrays in place of a model.

    Args:
        config: verl's ``actor_rollout_ref``.
        is_hybrid: whether it has a rollout, as `ActorRolloutRefWorker`.
    """

    def __init__(self, config: Any, is_hybrid: bool) -> None:
        super().__init__()
        own = omega_conf_to_dataclass(config.rollout)
        model = omega_conf_to_dataclass(config.model)
        self.weights = load_file(pathlib.Path(model.local_path, "model.safetensors"))
        if is_hybrid:
            self.rollout = get_rollout_class(own.name, own.mode)(own, model, None)
        else:
            engine = own.checkpoint_engine
            import_external_libs(engine.custom_backend_module)
            options = engine.engine_kwargs[engine.backend]
            self.engine = CheckpointEngineRegistry.new(engine.backend, 2**20, **options)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, how: str) -> None:
        """Change the weights."""
        name = "model.layers.0.mlp.down_proj.weight"
        if how == "NaN":
            self.weights[name] = torch.full_like(self.weights[name], float("nan"))
        elif how == "half":
            self.weights = dict(list(self.weights.items())[:3])
        else:
            self.weights = load_file(how)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> None:
        def sent() -> Iterator[tuple[str, torch.Tensor]]:
            yield from self.weights.items()

        if mode != "naive":
            await self.engine.send_weights(sent(), global_steps=global_steps)
            return
        await self.rollout.resume(tags=["weights"])
        await self.rollout.update_weights(
            sent(), peft_config=None, base_sync_done=True, global_steps=global_steps
        )
        await self.rollout.resume(tags=["kv_cache"])

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.engine, method)(*args, **kwargs)


def configuration(given: Asked, *overrides: str) -> Any:
    """verl's own, with rjax chosen by name."""
    folder = pathlib.Path(verl.__file__).parent / "trainer" / "config"
    rollout = "actor_rollout_ref.rollout."
    with initialize_config_dir(config_dir=str(folder), version_base=None):
        return compose(
            config_name="ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={given.model_folder}",
                f"{rollout}name=rjax",
                f"{rollout}dtype=float32",
                f"{rollout}n_gpus_per_node=1",
                f"{rollout}tensor_model_parallel_size=1",
                f"{rollout}prompt_length=200",
                f"{rollout}response_length={LENGTH}",
                f"{rollout}max_model_len=256",
                f"{rollout}max_num_seqs=4",
                f"{rollout}max_num_batched_tokens=64",
                f"{rollout}load_format=auto",
                f"{rollout}calculate_log_probs=true",
                f"{rollout}agent.num_workers=1",
                f"+{rollout}engine_kwargs.rjax={json.dumps(ENGINE).replace('"', '')}",
                *overrides,
            ],
        )


def trainers(config: Any, *, is_hybrid: bool) -> RayWorkerGroup:
    made = RayClassWithInitArgs(
        cls=ray.remote(Trainer), config=config.actor_rollout_ref, is_hybrid=is_hybrid
    )
    pool = RayResourcePool(process_on_nodes=[1], max_colocate_count=1)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cuda")


def said(folder: str, weights: Any, prompt: list[int] = PROMPT) -> list[int]:
    """What an engine says that has these weights."""
    llm = LLM(folder, dtype="float32", use_tqdm=False, **ENGINE)
    llm.update_weights(weights)
    params = SamplingParams(temperature=0, max_tokens=LENGTH)
    found = llm.generate([{"prompt_token_ids": prompt}], params)[0].outputs[0].token_ids
    llm.close()
    return list(found)


def other_weights(given: Asked) -> tuple[dict[str, torch.Tensor], str]:
    """Other weights of the model, and the file that has them."""
    folder = pathlib.Path(given.model_folder)
    found = load_file(folder / "model.safetensors")
    changed = {n: w.flip(1).contiguous() if w.ndim == 2 else w for n, w in found.items()}
    path = pathlib.Path(tempfile.mkdtemp(), "trained.safetensors")
    save_file(changed, path, metadata={"format": "pt"})
    return changed, str(path)


def start_ray() -> None:
    ray.shutdown()
    names = ("VERL_USE_EXTERNAL_MODULES", "PYTHONPATH", "JAX_PLATFORMS")
    env = {name: os.environ[name] for name in names if name in os.environ}
    path = [str(pathlib.Path(__file__).parent), env.get("PYTHONPATH", "")]
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(path)}
    ray.init(
        address="local",
        log_to_driver=False,
        num_cpus=8,
        num_gpus=2,
        object_store_memory=2**28,
        include_dashboard=False,
        runtime_env={"env_vars": env},
    )


async def drive_standalone(given: Asked) -> None:
    first_weights = load_file(pathlib.Path(given.model_folder, "model.safetensors"))
    weights, trained = other_weights(given)
    first, second = said(given.model_folder, first_weights), said(given.model_folder, weights)
    assert first != second
    folder = tempfile.mkdtemp()
    engine = "actor_rollout_ref.rollout.checkpoint_engine."
    config = configuration(
        given,
        "actor_rollout_ref.rollout.nnodes=1",
        f"{engine}backend=folder",
        f"{engine}custom_backend_module=use_verl",
        f"+{engine}engine_kwargs.folder.folder={folder}",
    )
    manager = await LLMServerManager.create(config=config)
    trainer = trainers(config, is_hybrid=False)
    checkpoints = CheckpointEngineManager(
        config=omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine),
        actor_wg=trainer,
        replicas=manager.get_replicas(),
    )
    client = manager.get_client()

    async def ask(client: Any = client, **more: Any) -> Any:
        return await client.generate("one", prompt_ids=PROMPT, sampling_params={**GREEDY, **more})

    output = await ask()
    assert (output.token_ids, output.stop_reason) == (first, "completed"), output
    assert len(output.log_probs) == LENGTH
    assert output.extra_fields["global_steps"] is None

    trainer.train(trained)
    await checkpoints.update_weights(global_steps=1)
    output = await ask()
    assert output.token_ids == second, output
    assert output.extra_fields["global_steps"] == 1
    check_http(manager.get_addresses()[0], given.model_folder, second)

    resuming = manager.get_client(client_cls=FullyAsyncLLMServerClient)
    long = asyncio.create_task(ask(resuming, max_tokens=150, ignore_eos=True))
    await asyncio.sleep(0.5)
    await checkpoints.update_weights(global_steps=2)
    output = await long
    assert len(output.token_ids) == len(output.log_probs) == 150
    assert output.extra_fields["max_global_steps"] in (1, 2)

    replica = manager.get_replicas()[0]
    for step, how in enumerate(("NaN", "half"), 3):
        trainer.train(how)
        tried = asyncio.create_task(checkpoints.update_weights(global_steps=step))
        await asyncio.wait([tried])
        assert "InvalidWeightsError" in str(tried.exception()), (how, tried)
        await replica.resume_kv_cache()
        await replica.resume_generation()
        output = await ask()
        assert output.token_ids == second
        assert output.extra_fields["global_steps"] == 2
        trainer.train(trained)

    await replica.abort_all_requests(reject_request=True)
    rejected = await ask()
    assert (rejected.token_ids, rejected.stop_reason) == ([], "aborted")
    await replica.resume_generation()
    await run_agent_loop(config, client, second)


def check_http(address: str, model: str, wanted: list[int]) -> None:
    """The OpenAI routes of the server have the same weights."""
    body = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": LENGTH,
        "temperature": 0,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"http://{address}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request) as response:
        found = json.load(response)["choices"][0]
    assert found["token_ids"] == wanted, found


async def run_agent_loop(config: Any, client: Any, wanted: list[int]) -> None:
    """verl's agent loop samples a batch; its tokens are those of a plain engine."""
    loop = await AgentLoopManager.create(config=config, llm_client=client)
    texts = [[{"role": "user", "content": text}] for text in ("one", "two", "three")]
    prompts = np.empty(3, object)
    prompts[:] = texts
    batch = DataProto(
        non_tensor_batch={
            "raw_prompt": prompts,
            "agent_name": np.array(["single_turn_agent"] * 3),
            "data_source": np.array(["openai/gsm8k"] * 3),
            "reward_model": np.array([{"style": "rule", "ground_truth": "1.0"}] * 3),
        },
        meta_info={"validate": True, "global_steps": 1},
    )
    result = await loop.generate_sequences(prompts=batch)
    assert len(result) == 3
    size = result.batch["prompts"].size(1)
    assert result.batch["rollout_log_probs"].shape == result.batch["responses"].shape
    for row in range(3):
        mask = result.batch["attention_mask"][row].bool()
        prompt = result.batch["prompts"][row][mask[:size]].tolist()
        answer = result.batch["responses"][row][mask[size:]].tolist()
        direct = await client.generate(
            f"direct {row}", prompt_ids=prompt, sampling_params={"temperature": 0.0}
        )
        assert answer == direct.token_ids, (answer, direct.token_ids)


async def drive_hybrid(given: Asked) -> None:
    weights, trained = other_weights(given)
    second = said(given.model_folder, weights)
    config = configuration(given)
    trainer = trainers(config, is_hybrid=True)
    manager = await LLMServerManager.create(config=config, worker_group=trainer)
    checkpoints = CheckpointEngineManager(
        config=omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine),
        actor_wg=trainer,
        replicas=manager.get_replicas(),
    )
    client = manager.get_client()
    for step in (1, 2):
        await checkpoints.sleep_replicas()
        if step == 1:
            trainer.train(trained)
        await checkpoints.update_weights(global_steps=step)
        output = await client.generate(f"{step}", prompt_ids=PROMPT, sampling_params=dict(GREEDY))
        assert output.token_ids == second, output
        assert output.extra_fields["global_steps"] == step


def standalone(given: Asked) -> None:
    """A replica of its own: generation, updates, aborts, and verl's agent loop."""
    start_ray()
    asyncio.run(drive_standalone(given))
    ray.shutdown()


def hybrid(given: Asked) -> None:
    """A replica on the devices of its trainer: it sleeps while that one trains."""
    start_ray()
    asyncio.run(drive_hybrid(given))
    ray.shutdown()


if __name__ == "__main__":
    sys.modules["use_verl"] = sys.modules["__main__"]
    run(standalone, hybrid)
