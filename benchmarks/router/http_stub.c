/* Emulates engines for HTTP proxies: one port per engine, the same pieces at the same times as engine_stub.py.
 *
 * An engine steps on a fixed grid, engines staggered over the step (or all at once with --lockstep). A step gives one
 * token to each running decode, and what its chunk size leaves to prefills, first come first served; a prefill that
 * completes gives its first token in the same step. One send per token, as a real engine's server does.
 *
 *   http_stub --port-base P --engines N --step-us US --chunk-tokens N --pieces FILE --stamps FILE [--lockstep] */
#include "bench.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>

#define MAX_ENGINES 256
#define MAX_REQUEST_BYTES (4u << 20)
#define NO_POSITION UINT32_MAX

enum kind { LISTENER, TIMER, CONNECTION };

struct buffer {
  char *data;
  size_t begin, end, capacity;
};

struct connection {
  enum kind kind;
  int fd;
  uint32_t engine;
  uint32_t position; /* in the engine's list, or NO_POSITION */
  bool is_running;   /* a request is being answered */
  bool is_stream;
  bool is_waiting_for_room; /* EPOLLOUT is asked for */
  bool is_dead;             /* closed; freed after the batch of events */
  uint64_t request;
  uint32_t num_tokens, num_sent;
  uint32_t prefill_tokens; /* left to compute */
  struct buffer in, out;
};

struct listener {
  enum kind kind;
  int fd;
  uint32_t engine;
};

/* Requests of an engine in order of arrival: decodes and prefills alike. */
struct engine {
  struct connection **requests;
  uint32_t count, capacity;
};

static struct engine engines[MAX_ENGINES];
static uint32_t num_engines, chunk_tokens;
static bool is_lockstep;
static struct pieces pieces;
static struct stamps stamps;
static int epoll_fd;
static struct connection **graveyard;
static size_t num_dead, graveyard_capacity;

/* An event of a real server (vLLM's completions API), with room for the piece. */
static const char EVENT_HEAD[] =
    "data: {\"id\":\"cmpl-0123456789abcdef0123456789abcdef\",\"object\":\"text_completion\",\"created\":1790000000,"
    "\"model\":\"tiny\",\"choices\":[{\"index\":0,\"text\":\"";
static const char EVENT_TAIL[] = "\",\"logprobs\":null,\"finish_reason\":null}]}\n\n";
static const char LAST_TAIL[] = "\",\"logprobs\":null,\"finish_reason\":\"length\"}]}\n\n";
static const char DONE_AND_END[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
static const char STREAM_HEAD[] =
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
    "Transfer-Encoding: chunked\r\n\r\n";

static void reserve(struct buffer *buffer, size_t bytes) {
  if (buffer->begin == buffer->end) buffer->begin = buffer->end = 0;
  if (buffer->end + bytes <= buffer->capacity) return;
  memmove(buffer->data, buffer->data + buffer->begin, buffer->end - buffer->begin);
  buffer->end -= buffer->begin;
  buffer->begin = 0;
  if (buffer->end + bytes > buffer->capacity) {
    buffer->capacity = (buffer->end + bytes) * 2;
    buffer->data = allocate(buffer->data, buffer->capacity);
  }
}

static void leave_engine(struct connection *connection) {
  if (connection->position == NO_POSITION) return;
  struct engine *engine = &engines[connection->engine];
  /* Order matters to prefills only; a decode at the end takes the place of the one that left. */
  uint32_t last = --engine->count;
  bool is_in_order = connection->prefill_tokens > 0 || engine->requests[last]->prefill_tokens > 0;
  if (is_in_order) {
    for (uint32_t i = connection->position; i < last; i++) {
      engine->requests[i] = engine->requests[i + 1];
      engine->requests[i]->position = i;
    }
  } else {
    engine->requests[connection->position] = engine->requests[last];
    engine->requests[connection->position]->position = connection->position;
  }
  connection->position = NO_POSITION;
}

static void join_engine(struct connection *connection) {
  struct engine *engine = &engines[connection->engine];
  if (engine->count == engine->capacity) {
    engine->capacity = engine->capacity ? engine->capacity * 2 : 64;
    engine->requests = allocate(engine->requests, engine->capacity * sizeof(struct connection *));
  }
  connection->position = engine->count;
  engine->requests[engine->count++] = connection;
}

static void close_connection(struct connection *connection) {
  if (connection->is_dead) return;
  leave_engine(connection);
  close(connection->fd);
  connection->is_dead = true;
  if (num_dead == graveyard_capacity) {
    graveyard_capacity = graveyard_capacity ? graveyard_capacity * 2 : 64;
    graveyard = allocate(graveyard, graveyard_capacity * sizeof *graveyard);
  }
  graveyard[num_dead++] = connection;
}

static void bury(void) {
  while (num_dead) {
    struct connection *connection = graveyard[--num_dead];
    free(connection->in.data);
    free(connection->out.data);
    free(connection);
  }
}

static void watch(struct connection *connection, bool is_waiting_for_room) {
  if (connection->is_waiting_for_room == is_waiting_for_room) return;
  connection->is_waiting_for_room = is_waiting_for_room;
  struct epoll_event event = {EPOLLIN | (is_waiting_for_room ? EPOLLOUT : 0u), {.ptr = connection}};
  epoll_ctl(epoll_fd, EPOLL_CTL_MOD, connection->fd, &event);
}

static void transmit(struct connection *connection, const char *data, size_t size) {
  struct buffer *out = &connection->out;
  if (out->begin == out->end) {
    ssize_t sent = send(connection->fd, data, size, MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN) {
      close_connection(connection);
      return;
    }
    if (sent > 0) data += sent, size -= (size_t)sent;
  }
  if (!size) return;
  reserve(out, size);
  memcpy(out->data + out->end, data, size);
  out->end += size;
  watch(connection, true);
}

static void flush(struct connection *connection) {
  struct buffer *out = &connection->out;
  ssize_t sent = send(connection->fd, out->data + out->begin, out->end - out->begin, MSG_NOSIGNAL);
  if (sent < 0 && errno != EAGAIN) {
    close_connection(connection);
    return;
  }
  if (sent > 0) out->begin += (size_t)sent;
  if (out->begin == out->end) watch(connection, false);
}

static size_t put(char *at, const char *text, size_t size) {
  memcpy(at, text, size);
  return size;
}

/* One token as a chunk of the stream; the last one carries the end of the answer too. */
static size_t put_event(char *at, const char *piece, bool is_last) {
  const char *tail = is_last ? LAST_TAIL : EVENT_TAIL;
  size_t tail_size = is_last ? sizeof LAST_TAIL - 1 : sizeof EVENT_TAIL - 1;
  size_t event_size = sizeof EVENT_HEAD - 1 + PIECE_BYTES + tail_size;
  size_t size = (size_t)sprintf(at, "%zx\r\n", event_size);
  size += put(at + size, EVENT_HEAD, sizeof EVENT_HEAD - 1);
  size += put(at + size, piece, PIECE_BYTES);
  size += put(at + size, tail, tail_size);
  size += put(at + size, "\r\n", 2);
  if (is_last) size += put(at + size, DONE_AND_END, sizeof DONE_AND_END - 1);
  return size;
}

static void answer_whole(struct connection *connection) {
  size_t text_size = (size_t)connection->num_tokens * PIECE_BYTES;
  char *body = allocate(NULL, text_size + 512);
  size_t size = (size_t)sprintf(
      body, "{\"id\":\"cmpl-0123456789abcdef\",\"object\":\"text_completion\",\"model\":\"tiny\",\"choices\":[{\"index\":0,\"text\":\"");
  for (uint32_t i = 0; i < connection->num_tokens; i++)
    size += put(body + size, piece_of(&pieces, connection->request, i), PIECE_BYTES);
  size += (size_t)sprintf(body + size, "\",\"logprobs\":null,\"finish_reason\":\"length\"}]}");
  char head[128];
  int head_size = sprintf(head, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n", size);
  body = allocate(body, size + (size_t)head_size);
  memmove(body + head_size, body, size);
  memcpy(body, head, (size_t)head_size);
  transmit(connection, body, size + (size_t)head_size);
  free(body);
}

static void end_request(struct connection *connection) {
  leave_engine(connection);
  connection->is_running = false;
}

static void give_token(struct connection *connection, uint64_t now) {
  uint32_t index = connection->num_sent++;
  bool is_last = connection->num_sent == connection->num_tokens;
  stamp_row(&stamps, connection->request)[1 + index] = now;
  stamps.header[STAMP_TOKENS_SENT]++;
  if (is_last) end_request(connection);
  if (connection->is_stream) {
    char event[1024];
    size_t size = index ? 0 : put(event, STREAM_HEAD, sizeof STREAM_HEAD - 1);
    size += put_event(event + size, piece_of(&pieces, connection->request, index), is_last);
    transmit(connection, event, size);
  } else if (is_last) {
    answer_whole(connection);
  }
}

static void step(uint32_t index) {
  struct engine *engine = &engines[index];
  uint32_t num_decodes = 0;
  for (uint32_t i = 0; i < engine->count; i++) num_decodes += engine->requests[i]->prefill_tokens == 0;
  uint32_t room = chunk_tokens > num_decodes ? chunk_tokens - num_decodes : 0;
  /* Requests that end or die leave the list, so that another takes their place: i stays then. */
  for (uint32_t i = 0; i < engine->count;) {
    struct connection *connection = engine->requests[i];
    if (connection->prefill_tokens) {
      uint32_t chunk = connection->prefill_tokens < room ? connection->prefill_tokens : room;
      connection->prefill_tokens -= chunk;
      room -= chunk;
    }
    if (!connection->prefill_tokens) give_token(connection, now_ns());
    if (i < engine->count && engine->requests[i] == connection) i++;
  }
}

static void answer_probe(struct connection *connection, const char *path) {
  const char *body = strncmp(path, "/v1/models", 10)
                         ? "{\"status\":\"ok\"}"
                         : "{\"object\":\"list\",\"data\":[{\"id\":\"tiny\",\"object\":\"model\",\"owned_by\":\"stub\"}]}";
  char answer[512];
  int size = sprintf(answer, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
                     strlen(body), body);
  transmit(connection, answer, (size_t)size);
}

static void start_request(struct connection *connection, const char *body, size_t size) {
  size_t prompt_bytes = 0;
  json_string(body, size, "\"prompt\":", &prompt_bytes);
  connection->request = json_number(body, size, "\"seed\":", 0);
  connection->num_tokens = (uint32_t)json_number(body, size, "\"max_tokens\":", 16);
  if (!connection->num_tokens || connection->num_tokens >= stamps.columns)
    die("max_tokens %u: the table of stamps holds 1 to %lu", connection->num_tokens, (unsigned long)stamps.columns - 1);
  connection->is_stream =
      memmem(body, size, "\"stream\":true", 13) != NULL || memmem(body, size, "\"stream\": true", 14) != NULL;
  connection->prefill_tokens = (uint32_t)(prompt_bytes / PIECE_BYTES);
  if (!connection->prefill_tokens) connection->prefill_tokens = 1;
  connection->num_sent = 0;
  connection->is_running = true;
  stamp_row(&stamps, connection->request)[0] = now_ns();
  stamps.header[STAMP_REQUESTS_READ]++;
  join_engine(connection);
}

/* Takes one whole request from the buffer, if there is one. */
static void take_request(struct connection *connection) {
  struct buffer *in = &connection->in;
  char *head = in->data + in->begin;
  size_t available = in->end - in->begin;
  char *end = available ? memmem(head, available, "\r\n\r\n", 4) : NULL;
  if (!end) return;
  if (!strncmp(head, "PRI ", 4)) { /* HTTP/2, which a router may try first, is not spoken here */
    close_connection(connection);
    return;
  }
  size_t head_size = (size_t)(end + 4 - head);
  const char *length = header_value(head, head_size, "content-length");
  if (header_value(head, head_size, "transfer-encoding")) die("chunked request bodies are not spoken here");
  size_t body_size = length ? strtoul(length, NULL, 10) : 0;
  if (body_size > MAX_REQUEST_BYTES) die("request of %zu bytes", body_size);
  if (available < head_size + body_size) return;
  in->begin += head_size + body_size;
  if (!strncmp(head, "POST /v1/completions ", 21)) {
    start_request(connection, head + head_size, body_size);
  } else {
    answer_probe(connection, strchr(head, ' ') + 1);
  }
}

static void receive(struct connection *connection) {
  reserve(&connection->in, 16384);
  struct buffer *in = &connection->in;
  ssize_t size = recv(connection->fd, in->data + in->end, in->capacity - in->end, 0);
  if (size == 0 || (size < 0 && errno != EAGAIN)) {
    close_connection(connection);
    return;
  }
  if (size > 0) in->end += (size_t)size;
  if (!connection->is_running) take_request(connection);
}

static void accept_all(struct listener *listener) {
  for (;;) {
    int fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) return;
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    struct connection *connection = calloc(1, sizeof *connection);
    if (!connection) die("out of memory");
    connection->kind = CONNECTION;
    connection->fd = fd;
    connection->engine = listener->engine;
    connection->position = NO_POSITION;
    struct epoll_event event = {EPOLLIN, {.ptr = connection}};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event);
  }
}

static void listen_on(uint32_t engine, uint16_t port) {
  struct listener *listener = allocate(NULL, sizeof *listener);
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), one = 1;
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  if (bind(fd, (struct sockaddr *)&address, sizeof address) || listen(fd, 4096))
    die("port %u: %s", port, strerror(errno));
  *listener = (struct listener){LISTENER, fd, engine};
  struct epoll_event event = {EPOLLIN, {.ptr = listener}};
  epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event);
}

static struct listener start_timer(uint64_t period_ns) {
  struct listener timer = {TIMER, timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC), 0};
  struct timespec period = {(time_t)(period_ns / 1000000000u), (long)(period_ns % 1000000000u)};
  struct itimerspec setting = {period, period};
  timerfd_settime(timer.fd, 0, &setting, NULL);
  return timer;
}

static void on_timer(int fd) {
  static uint32_t next;
  uint64_t num_ticks = 0;
  if (read(fd, &num_ticks, sizeof num_ticks) != sizeof num_ticks) return;
  /* Late ticks are made up for, but never more than one step of each engine: time lost is lost. */
  uint32_t most = is_lockstep ? 1 : num_engines;
  for (uint64_t i = 0; i < num_ticks && i < most; i++) {
    if (is_lockstep) {
      for (uint32_t engine = 0; engine < num_engines; engine++) step(engine);
    } else {
      step(next);
      next = (next + 1) % num_engines;
    }
  }
}

static void serve_connection(struct connection *connection, uint32_t events) {
  if (connection->is_dead) return;
  if (events & EPOLLOUT) flush(connection);
  if (!connection->is_dead && (events & (EPOLLIN | EPOLLHUP | EPOLLERR))) receive(connection);
}

int main(int count, char **values) {
  uint32_t port = (uint32_t)number_option(count, values, "--port-base", 26100);
  uint64_t step_ns = (uint64_t)(number_option(count, values, "--step-us", 33333) * 1000);
  num_engines = (uint32_t)number_option(count, values, "--engines", 32);
  chunk_tokens = (uint32_t)number_option(count, values, "--chunk-tokens", 2048);
  is_lockstep = has_option(count, values, "--lockstep");
  if (num_engines < 1 || num_engines > MAX_ENGINES) die("--engines: 1 to %d", MAX_ENGINES);
  if (!chunk_tokens || !step_ns) die("--chunk-tokens and --step-us: above 0");
  pieces = load_pieces(option(count, values, "--pieces", NULL));
  stamps = map_stamps(option(count, values, "--stamps", NULL));
  epoll_fd = epoll_create1(EPOLL_CLOEXEC);
  for (uint32_t engine = 0; engine < num_engines; engine++) listen_on(engine, (uint16_t)(port + engine));
  struct listener timer = start_timer(is_lockstep ? step_ns : step_ns / num_engines);
  struct epoll_event timer_event = {EPOLLIN, {.ptr = &timer}};
  epoll_ctl(epoll_fd, EPOLL_CTL_ADD, timer.fd, &timer_event);
  puts("ready");
  fflush(stdout);
  for (;;) {
    struct epoll_event events[256];
    int num_events = epoll_wait(epoll_fd, events, 256, -1);
    for (int i = 0; i < num_events; i++) {
      enum kind kind = *(enum kind *)events[i].data.ptr;
      if (kind == LISTENER) accept_all(events[i].data.ptr);
      else if (kind == TIMER) on_timer(((struct listener *)events[i].data.ptr)->fd);
      else serve_connection(events[i].data.ptr, events[i].events);
    }
    bury();
  }
}
