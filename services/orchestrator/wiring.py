"""Gives servicers, recovery and lifecycle their parts of the core.

Each function makes one consumer. Consumers name the parts that they need, import no core, and know no other part.
"""

from __future__ import annotations

from services.orchestrator.core import OrchestratorCore
from services.orchestrator.lifecycle import RunParts
from services.orchestrator.metrics import StepRows
from services.orchestrator.progress import summary
from services.orchestrator.rpc.gateway_api import GatewayApi
from services.orchestrator.rpc.replica_api import ReplicaApi
from services.orchestrator.rpc.servicer_pool import PoolServicer
from services.orchestrator.rpc.servicer_training import TrainerApi, TrainingServicer


def run_parts(core: OrchestratorCore) -> RunParts:
    """For ``lifecycle.live``."""
    return RunParts(
        control=core.control,
        evaluation=core.recipe.evaluation,
        evaluations=core.evaluations,
        events=core,
        ledgers=core.ledgers,
        metrics=core.metrics,
        run_dir=core.run_dir,
        summary=lambda: summary(core),
        threshold=core.threshold,
        versions=core.versions,
    )


# --- rpc -------------------------------------------------------------------------------------------------------------


def replica_api(core: OrchestratorCore) -> ReplicaApi:
    return ReplicaApi(
        pool=core.pool,
        turns=core.turns,
        dispatcher=core.dispatcher,
        absences=core.absences,
        control=core.control,
        ledgers=core.ledgers,
        with_trainer=core.batches.keys() if core.num_steps else (),
        adopt_version=core.versions.adopt,
        counters=core.counters,
        timeline=core.timeline,
    )


def trainer_api(core: OrchestratorCore) -> TrainerApi:
    return TrainerApi(
        trainers=core.trainers,
        turns=core.turns,
        absences=core.absences,
        control=core.control,
        ledgers=core.ledgers,
        versions=core.versions,
        batches=core.batches,
        last_batch_taken=core.last_batch_taken,
        record_bounds=core.bounds,
        journal=core.journal,
        step_rows=StepRows(
            batches=core.batches,
            curation=core.training_orders,
            last_metrics=core.versions.last_metrics,
            metrics=core.metrics,
            started_at=core.started_at,
            write_state=core.write_state,
        ),
        timeline=core.timeline,
    )


def gateway_api(core: OrchestratorCore) -> GatewayApi:
    return GatewayApi(core.recipe.envgateway, core.pool, core.dispatcher)


def pool_servicer(core: OrchestratorCore) -> PoolServicer:
    return PoolServicer(
        core.run_id,
        replicas=replica_api(core),
        gateway=gateway_api(core),
        pool=core.pool,
        ledgers=core.ledgers,
        control=core.control,
        ingest=core.ingest,
        metrics=core.metrics,
    )


def training_servicer(core: OrchestratorCore) -> TrainingServicer:
    return TrainingServicer(
        core.run_id,
        api=trainer_api(core),
        trainers=core.trainers,
        turns=core.turns,
        ledgers=core.ledgers,
        num_steps=core.num_steps,
    )
