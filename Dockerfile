# flowrl for the CPU, or for NVIDIA GPUs (torch of PyPI contains CUDA's libraries):
#   docker build -t flowrl .
#   docker build -t flowrl:cuda --build-arg TORCH_INDEX=https://pypi.org/simple .
FROM python:3.12-slim-bookworm AS base
# g++: torch.compile and Triton; libgl1, libglib2.0-0: the OCR reward
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git libgl1 libglib2.0-0 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home --shell /bin/bash flowrl \
    && chmod 755 /home/flowrl
USER 1000
WORKDIR /home/flowrl
ENV PATH=/home/flowrl/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY constraints.txt ./
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python -m venv venv \
    && pip install torch -c constraints.txt --extra-index-url "$TORCH_INDEX"

FROM base
COPY --chown=flowrl . source
ARG EXTRAS=datasets,remote,rewards,server,trackers
RUN pip install "./source[$EXTRAS]" -c constraints.txt
ENTRYPOINT ["flowrl"]
CMD ["--help"]
