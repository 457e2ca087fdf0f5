"""A FlyteAdmin that flytekit's real clients talk to: gRPC in this process, uploads to an S3 server.

It keeps what is registered and launched, answers as FlyteAdmin does (codes included), and runs
nothing. What lives here is the server; what a test reads back is in `Admin`'s tables.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import grpc
from flyteidl.admin import (
    execution_pb2,
    launch_plan_pb2,
    project_pb2,
    task_pb2,
    version_pb2,
    workflow_pb2,
)
from flyteidl.core import execution_pb2 as core_execution_pb2
from flyteidl.core.compiler_pb2 import CompiledTask, CompiledWorkflow, CompiledWorkflowClosure
from flyteidl.core.identifier_pb2 import Identifier, WorkflowExecutionIdentifier
from flyteidl.service import admin_pb2_grpc, auth_pb2, auth_pb2_grpc, dataproxy_pb2
from flyteidl.service import dataproxy_pb2_grpc as dataproxy
from google.protobuf.timestamp_pb2 import Timestamp
from s3_server import ACCESS_KEY, REGION, SECRET_KEY, s3_server

BUCKET = "flyte"
Key = tuple[str, str, str, str]  # project, domain, name, version


def key_of(ident: Identifier) -> Key:
    return ident.project, ident.domain, ident.name, ident.version


@dataclass
class Admin(
    admin_pb2_grpc.AdminServiceServicer,
    dataproxy.DataProxyServiceServicer,
    auth_pb2_grpc.AuthMetadataServiceServicer,
):
    """The server's state and its answers."""

    s3: Any  # boto3 client of the object store
    tasks: dict[Key, task_pb2.TaskSpec] = field(default_factory=dict)
    workflows: dict[Key, workflow_pb2.WorkflowSpec] = field(default_factory=dict)
    launch_plans: dict[Key, launch_plan_pb2.LaunchPlanSpec] = field(default_factory=dict)
    active: dict[str, Key] = field(default_factory=dict)  # launch plan → its active version
    executions: dict[str, execution_pb2.ExecutionCreateRequest] = field(default_factory=dict)
    created: list[Key] = field(default_factory=list)  # in the order of arrival

    def CreateTask(self, request: Any, context: Any) -> task_pb2.TaskCreateResponse:
        self._create(self.tasks, request, context)
        return task_pb2.TaskCreateResponse()

    def GetTask(self, request: Any, context: Any) -> task_pb2.Task:
        spec = self._get(self.tasks, request, context)
        closure = task_pb2.TaskClosure(compiled_task=CompiledTask(template=spec.template))
        return task_pb2.Task(id=request.id, closure=closure)

    def CreateWorkflow(self, request: Any, context: Any) -> workflow_pb2.WorkflowCreateResponse:
        for ident in tasks_in(request.spec):
            if key_of(ident) not in self.tasks:
                context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT, f"task {ident.name} is not registered"
                )
        self._create(self.workflows, request, context)
        return workflow_pb2.WorkflowCreateResponse()

    def GetWorkflow(self, request: Any, context: Any) -> workflow_pb2.Workflow:
        spec = self._get(self.workflows, request, context)
        used = {key_of(ident): ident for ident in tasks_in(spec)}
        compiled = CompiledWorkflowClosure(
            primary=CompiledWorkflow(template=spec.template),
            sub_workflows=[CompiledWorkflow(template=sub) for sub in spec.sub_workflows],
            tasks=[CompiledTask(template=self.tasks[key].template) for key in used],
        )
        closure = workflow_pb2.WorkflowClosure(compiled_workflow=compiled)
        return workflow_pb2.Workflow(id=request.id, closure=closure)

    def CreateLaunchPlan(
        self, request: Any, context: Any
    ) -> launch_plan_pb2.LaunchPlanCreateResponse:
        if key_of(request.spec.workflow_id) not in self.workflows:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "its workflow is not registered")
        self._create(self.launch_plans, request, context)
        return launch_plan_pb2.LaunchPlanCreateResponse()

    def GetLaunchPlan(self, request: Any, context: Any) -> launch_plan_pb2.LaunchPlan:
        return self._launch_plan(request.id, self._get(self.launch_plans, request, context))

    def ListLaunchPlans(self, request: Any, context: Any) -> launch_plan_pb2.LaunchPlanList:
        wanted = (request.id.project, request.id.domain, request.id.name)
        found = [key for key in reversed(self.created) if key in self.launch_plans]
        plans = [
            self._launch_plan(_identifier(key), self.launch_plans[key])
            for key in found
            if key[:3] == wanted
        ]
        return launch_plan_pb2.LaunchPlanList(launch_plans=plans[: request.limit or None])

    def GetActiveLaunchPlan(self, request: Any, context: Any) -> launch_plan_pb2.LaunchPlan:
        key = self.active.get(request.id.name)
        if key is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "no active version")
        return self._launch_plan(_identifier(key), self.launch_plans[key])

    def UpdateLaunchPlan(
        self, request: Any, context: Any
    ) -> launch_plan_pb2.LaunchPlanUpdateResponse:
        self._get(self.launch_plans, request, context)
        if request.state == launch_plan_pb2.ACTIVE:
            self.active[request.id.name] = key_of(request.id)
        return launch_plan_pb2.LaunchPlanUpdateResponse()

    def CreateExecution(self, request: Any, context: Any) -> Any:
        spec = self.launch_plans.get(key_of(request.spec.launch_plan))
        if spec is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "its launch plan is not registered")
        fixed = set(request.inputs.literals) & set(spec.fixed_inputs.literals)
        known = set(spec.default_inputs.parameters) | set(spec.fixed_inputs.literals)
        if fixed or set(request.inputs.literals) - known:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"inputs {fixed or set(request.inputs.literals) - known} can't be given",
            )
        name = request.name or f"a{uuid.uuid4().hex[:19]}"
        self.executions[name] = request
        return execution_pb2.ExecutionCreateResponse(id=self._execution_id(request, name))

    def GetExecution(self, request: Any, context: Any) -> execution_pb2.Execution:
        made = self.executions.get(request.id.name)
        if made is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such execution")
        now = Timestamp()
        now.GetCurrentTime()
        plan = made.spec.launch_plan
        workflow = self.launch_plans[key_of(plan)].workflow_id
        closure = execution_pb2.ExecutionClosure(
            phase=core_execution_pb2.WorkflowExecution.QUEUED,
            created_at=now,
            updated_at=now,
            workflow_id=workflow,
        )
        ident = self._execution_id(made, request.id.name)
        return execution_pb2.Execution(id=ident, spec=made.spec, closure=closure)

    def GetExecutionData(self, request: Any, context: Any) -> Any:
        return execution_pb2.WorkflowExecutionGetDataResponse()

    def ListProjects(self, request: Any, context: Any) -> project_pb2.Projects:
        return project_pb2.Projects(projects=[project_pb2.Project(id="hybridflyte")])

    def GetVersion(self, request: Any, context: Any) -> version_pb2.GetVersionResponse:
        return version_pb2.GetVersionResponse()

    def GetPublicClientConfig(self, request: Any, context: Any) -> Any:
        return auth_pb2.PublicClientAuthConfigResponse()

    def CreateUploadLocation(self, request: Any, context: Any) -> Any:
        root = request.filename_root or request.content_md5.hex() or uuid.uuid4().hex
        key = f"{request.project}/{request.domain}/{root}/{request.filename}"
        url = self.s3.generate_presigned_url(
            "put_object", Params={"Bucket": BUCKET, "Key": key}, ExpiresIn=600
        )
        return dataproxy_pb2.CreateUploadLocationResponse(
            signed_url=url, native_url=f"s3://{BUCKET}/{key}"
        )

    def _create(self, table: dict[Key, Any], request: Any, context: Any) -> None:
        """Keep a specification under its name and version, once."""
        key = key_of(request.id)
        if key not in table:
            table[key] = request.spec
            self.created.append(key)
            return
        same = _bytes(table[key]) == _bytes(request.spec)
        code = grpc.StatusCode.ALREADY_EXISTS if same else grpc.StatusCode.INVALID_ARGUMENT
        said = "identical" if same else "different"
        context.abort(code, f"{request.id.name} with {said} structure already exists")

    def _get(self, table: dict[Key, Any], request: Any, context: Any) -> Any:
        if key_of(request.id) not in table:
            context.abort(grpc.StatusCode.NOT_FOUND, f"{request.id.name} is not registered")
        return table[key_of(request.id)]

    def _launch_plan(self, ident: Identifier, spec: Any) -> launch_plan_pb2.LaunchPlan:
        interface = self.workflows[key_of(spec.workflow_id)].template.interface
        state = (
            launch_plan_pb2.ACTIVE
            if self.active.get(ident.name) == key_of(ident)
            else launch_plan_pb2.INACTIVE
        )
        closure = launch_plan_pb2.LaunchPlanClosure(
            state=state,
            expected_inputs=spec.default_inputs,
            expected_outputs=interface.outputs,
        )
        return launch_plan_pb2.LaunchPlan(id=ident, spec=spec, closure=closure)

    @staticmethod
    def _execution_id(request: Any, name: str) -> WorkflowExecutionIdentifier:
        return WorkflowExecutionIdentifier(
            project=request.project, domain=request.domain, name=name
        )


def tasks_in(spec: Any) -> Iterator[Identifier]:
    """The tasks of a workflow and those inside it, their failure handlers among them."""
    for template in (spec.template, *spec.sub_workflows):
        for node in (*template.nodes, template.failure_node):
            yield from _tasks_of(node)


def _tasks_of(node: Any) -> Iterator[Identifier]:
    """The tasks that a node may run, those of a branch's cases among them."""
    if node.HasField("task_node"):
        yield node.task_node.reference_id
    elif node.HasField("branch_node"):
        block = node.branch_node.if_else
        for case in (block.case, *block.other):
            yield from _tasks_of(case.then_node)
        if block.HasField("else_node"):
            yield from _tasks_of(block.else_node)


def _identifier(key: Key) -> Identifier:
    return Identifier(resource_type=3, project=key[0], domain=key[1], name=key[2], version=key[3])


def _bytes(message: Any) -> bytes:
    content: bytes = message.SerializeToString(deterministic=True)
    return content


@dataclass(frozen=True)
class Cluster:
    """A running server and how to reach it."""

    admin: Admin
    endpoint: str  # host:port of the gRPC server
    s3: Any  # boto3 client
    s3_endpoint: str

    def config(self, folder: Path) -> Path:
        """Write Flyte's config.yaml for this server."""
        path = folder / "flyte.yaml"
        path.write_text(f"admin:\n  endpoint: {self.endpoint}\n  insecure: true\n")
        return path

    def download(self, uri: str) -> bytes:
        """The bytes of an uploaded file."""
        bucket, _, key = uri.removeprefix("s3://").partition("/")
        content: bytes = self.s3.get_object(Bucket=bucket, Key=key)["Body"].read()
        return content


@contextlib.contextmanager
def running() -> Iterator[Cluster]:
    """Run both servers for the block, on free ports of this machine."""
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    with s3_server() as endpoint:
        s3 = boto3.client(
            "s3",
            endpoint_url=endpoint,
            region_name=REGION,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
        )
        s3.create_bucket(Bucket=BUCKET)
        admin = Admin(s3)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
        dataproxy.add_DataProxyServiceServicer_to_server(admin, server)
        auth_pb2_grpc.add_AuthMetadataServiceServicer_to_server(admin, server)
        number = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield Cluster(admin, f"127.0.0.1:{number}", s3, endpoint)
        finally:
            server.stop(grace=None)
