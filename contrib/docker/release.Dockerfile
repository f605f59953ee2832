# The image of a release: GoReleaser puts the programs that it has built, one for each
# platform, into the folder that is built. From its last FROM on it is the Dockerfile,
# but for what it copies.
FROM alpine:3.22
RUN apk add --no-cache ca-certificates mailcap \
	&& adduser -D -H -u 10001 caddy \
	&& mkdir -p /etc/caddy /config/caddy /data/caddy \
	&& chown -R caddy:caddy /config /data
ARG TARGETPLATFORM
COPY $TARGETPLATFORM/caddy /usr/bin/caddy
COPY Caddyfile.example /etc/caddy/Caddyfile
ENV XDG_CONFIG_HOME=/config XDG_DATA_HOME=/data
VOLUME ["/config", "/data"]
USER 10001:10001
EXPOSE 8080 9180
# The admin endpoint is on localhost inside the container. Caddy logs requests of
# /metrics at level DEBUG only. An outage of Redis does not make Caddy unhealthy.
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s \
	CMD wget -q -O /dev/null http://127.0.0.1:2019/metrics || exit 1
CMD ["caddy", "run", "--config", "/etc/caddy/Caddyfile", "--adapter", "caddyfile"]
