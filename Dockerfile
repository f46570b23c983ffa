# The server, on the processor or a Vulkan GPU:
#
#   docker build -t gemma .
#   docker run --rm -p 8080:8080 -e GEMMA_API_KEY=... -v ~/.cache/huggingface:/models gemma -m google/gemma-3-4b-it-qat-q4_0-gguf
#   docker run --rm -p 8080:8080 -e GEMMA_API_KEY=... --device /dev/dri \
#     --group-add "$(stat -c %g /dev/dri/renderD128)" gemma                     # the demo, on a GPU
FROM rust:1-bookworm AS build
WORKDIR /gemma
COPY . .
RUN cargo build --release --locked --bin gemma

FROM debian:bookworm-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates libvulkan1 mesa-vulkan-drivers \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /gemma/target/release/gemma /usr/local/bin/gemma
RUN useradd --create-home gemma && mkdir /models && chown gemma /models
USER gemma
ENV HF_HOME=/models
EXPOSE 8080
ENTRYPOINT ["gemma", "serve", "--host", "0.0.0.0"]
