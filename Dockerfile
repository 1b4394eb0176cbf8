# docker build --tag paceline .
# docker build --build-arg EXTRAS=torch,remote --tag paceline .
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
ARG EXTRAS=torch
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/paceline-*.whl)[${EXTRAS}]" && useradd --create-home --uid 1000 paceline
# A number, so that Kubernetes can check that it is not root.
USER 1000
WORKDIR /work
ENTRYPOINT ["paceline"]
