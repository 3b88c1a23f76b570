/* Load generator: completions over HTTP/1.1, streamed or whole, at a fixed concurrency or open loop (Poisson).
 *
 * Every token is checked against what the stub must have sent and timed against the stub's stamp of it (bench.h), so a
 * lost, doubled or reordered token is an error and latency needs no clock in the text. Prints "begin" and "end" around
 * the window that it measures, then one line of JSON.
 *
 *   load --port P [--ports N] --concurrency N | --rate R --tokens N --prompt-tokens N --pieces FILE --stamps FILE
 *        [--warmup-s S] [--seconds S] [--unary] [--slow-percent P --stall-s S] [--disconnect-percent P] [--seed N]
 *        [--api-key KEY] [--tls] [--new-connections [--resume-sessions]]
 *   load --calibrate                  speed of this core: a loop of arithmetic, a send + receive on loopback */
#include "bench.h"
#include "client_tls.h"

#include <arpa/inet.h>
#include <math.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>

#define MAX_CONNECTIONS 20000
#define RECEIVE_BYTES 65536
#define TICK_NS 1000000u
#define RETRY_NS 20000000u
#define STUCK_NS 60000000000u
/* The load goes on for so long after the window, so that who watches sees the window only. */
#define LINGER_NS 300000000u

/* ---- Histograms: 128 buckets per power of two, so a percentile is within 0.8 %. ---- */

#define SUB_BITS 7
#define NUM_BUCKETS (64 << SUB_BITS)

struct histogram {
  uint64_t count, buckets[NUM_BUCKETS];
};

static void record(struct histogram *histogram, int64_t nanoseconds) {
  uint64_t value = nanoseconds < 1 ? 1 : (uint64_t)nanoseconds;
  uint32_t exponent = 63 - (uint32_t)__builtin_clzll(value);
  uint32_t shift = exponent > SUB_BITS ? exponent - SUB_BITS : 0;
  histogram->buckets[((uint64_t)shift << SUB_BITS) + (value >> shift)]++;
  histogram->count++;
}

static double percentile_ms(const struct histogram *histogram, double percent) {
  double rank = percent / 100 * (double)histogram->count;
  uint64_t seen = 0;
  for (uint64_t i = 0; i < NUM_BUCKETS; i++) {
    seen += histogram->buckets[i];
    if (!histogram->buckets[i] || (double)seen < rank) continue;
    uint64_t shift = i < (2u << SUB_BITS) ? 0 : (i >> SUB_BITS) - 1;
    return (double)((i - (shift << SUB_BITS)) << shift) / 1e6;
  }
  return 0;
}

static void print_histogram(const char *name, const struct histogram *histogram) {
  printf(",\"%s\":{\"count\":%lu", name, (unsigned long)histogram->count);
  if (histogram->count)
    printf(",\"p50_ms\":%.4f,\"p90_ms\":%.4f,\"p99_ms\":%.4f,\"p999_ms\":%.4f,\"max_ms\":%.4f",
           percentile_ms(histogram, 50), percentile_ms(histogram, 90), percentile_ms(histogram, 99),
           percentile_ms(histogram, 99.9), percentile_ms(histogram, 100));
  putchar('}');
}

/* ---- State ---- */

enum state { CLOSED, CONNECTING, SHAKING_HANDS, IDLE, IN_HEAD, IN_BODY };
enum framing { BY_LENGTH, BY_CHUNKS, BY_CLOSE };

struct connection {
  int fd;
  void *tls; /* NULL: in the open */
  enum state state;
  enum framing framing;
  bool is_slow, is_stalled, is_done, is_first_of_connection, is_retrying;
  uint64_t due_ns; /* when to connect, or to read again after a stall */
  uint64_t request, sent_ns, last_token_ns;
  uint32_t num_tokens, num_received, disconnect_at;
  uint64_t left;        /* bytes of the body or chunk still to come */
  char line[32768];     /* an incomplete line of the head, of the chunk framing or of the event stream */
  uint32_t line_length;
  bool is_in_chunk_size;
};

struct counters {
  uint64_t requests_started, requests_finished, tokens, disconnected, slow_aborted, dropped, opened, resumed;
  uint64_t refused, broken, status_errors, short_answers, wrong_tokens, error_events, stuck;
};

static struct settings {
  uint16_t port;
  uint32_t num_ports, concurrency, num_tokens, prompt_tokens;
  double rate, slow_percent, disconnect_percent, stall_s, warmup_s, seconds;
  bool is_unary, is_encrypted, has_new_connections, resumes_sessions;
  const char *model, *api_key;
} settings;

static struct connection *connections;
static uint32_t num_connections;
static struct pieces pieces;
static struct stamps stamps;
static struct counters counters;
static struct histogram token_latency, added_ttft, request_latency, ttft, gap, sent_gap, whole_latency;
static uint64_t next_request, begin_ns, end_ns, next_arrival_ns, random_state;
static int epoll_fd;
static char first_error[256];
static void *last_session; /* of TLS, for the next connection */

static double uniform(void) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return (double)(random_state >> 11) / 9007199254740992.0;
}

static bool is_measured(uint64_t now) { return now >= begin_ns && now < end_ns; }

__attribute__((format(printf, 1, 2))) static void note_error(const char *format, ...) {
  if (*first_error) return;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(first_error, sizeof first_error, format, arguments);
  va_end(arguments);
  for (char *at = first_error; *at; at++)
    if (*at == '"' || *at == '\\' || (unsigned char)*at < ' ') *at = '\'';
}

/* ---- Connections ---- */

static void watch(struct connection *connection, uint32_t events, int operation) {
  struct epoll_event event = {events, {.ptr = connection}};
  epoll_ctl(epoll_fd, operation, connection->fd, &event);
}

static void hang_up(struct connection *connection, uint64_t retry_at_ns) {
  if (connection->tls) tls_api.free(connection->tls);
  connection->tls = NULL;
  if (connection->state != CLOSED) close(connection->fd);
  connection->state = CLOSED;
  connection->is_stalled = false;
  connection->is_retrying = true;
  connection->due_ns = retry_at_ns;
}

static void open_connection(struct connection *connection) {
  int one = 1, small = 4096;
  uint16_t port = (uint16_t)(settings.port + (uint32_t)(connection - connections) % settings.num_ports);
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
  connection->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (connection->fd < 0) die("socket: %s", strerror(errno));
  setsockopt(connection->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  /* A small window, so that what a slow reader leaves waits in the router and not in the kernel. */
  if (connection->is_slow) setsockopt(connection->fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
  connection->state = CONNECTING;
  connection->is_retrying = false;
  connection->line_length = 0;
  if (connect(connection->fd, (struct sockaddr *)&address, sizeof address) && errno != EINPROGRESS) {
    counters.refused++;
    note_error("connect: %s", strerror(errno));
    hang_up(connection, now_ns() + RETRY_NS);
    return;
  }
  watch(connection, EPOLLOUT, EPOLL_CTL_ADD);
}

/* ---- Requests ---- */

static size_t write_prompt(char *at, uint64_t request) {
  /* Different from the first word on, so that no prefix cache takes part. */
  uint64_t state = request * 0x9e3779b97f4a7c15u + 1;
  for (uint32_t i = 0; i < settings.prompt_tokens; i++) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    memcpy(at + (size_t)i * PIECE_BYTES, pieces.text[state % pieces.count], PIECE_BYTES);
  }
  return (size_t)settings.prompt_tokens * PIECE_BYTES;
}

static uint32_t choose_num_tokens(const struct connection *connection) {
  /* The first answer of a connection has a random length, so that later ones do not end all at once. */
  if (settings.concurrency && connection->is_first_of_connection && !settings.is_unary)
    return 1 + (uint32_t)(uniform() * settings.num_tokens);
  return settings.num_tokens;
}

static void send_request(struct connection *connection) {
  static char *message;
  size_t room = (size_t)settings.prompt_tokens * PIECE_BYTES + 1024;
  if (!message) message = allocate(NULL, room * 2);
  connection->request = next_request++;
  connection->num_tokens = choose_num_tokens(connection);
  connection->is_first_of_connection = false;
  connection->num_received = 0;
  connection->is_done = false;
  connection->line_length = 0;
  bool is_cut = uniform() * 100 < settings.disconnect_percent;
  connection->disconnect_at = is_cut ? 1 + (uint32_t)(uniform() * connection->num_tokens) : UINT32_MAX;
  char *body = message + room;
  const char *scheme = *settings.api_key ? "Authorization: Bearer " : "", *end = *settings.api_key ? "\r\n" : "";
  size_t size = (size_t)sprintf(body, "{\"model\":\"%s\",\"prompt\":\"", settings.model);
  size += write_prompt(body + size, connection->request);
  size += (size_t)sprintf(body + size,
                          "\",\"max_tokens\":%u,\"stream\":%s,\"seed\":%lu,\"temperature\":1.0,\"ignore_eos\":true}",
                          connection->num_tokens, settings.is_unary ? "false" : "true",
                          (unsigned long)connection->request);
  size_t head = (size_t)sprintf(message,
                                "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:%u\r\nContent-Type: application/json\r\n"
                                "%s%s%sContent-Length: %zu\r\n\r\n",
                                settings.port, scheme, settings.api_key, end, size);
  memmove(message + head, body, size);
  volatile uint64_t *row = stamp_row(&stamps, connection->request);
  for (uint32_t i = 0; i <= connection->num_tokens; i++) row[i] = 0;
  connection->sent_ns = connection->last_token_ns = now_ns();
  connection->state = IN_HEAD;
  if (is_measured(connection->sent_ns)) counters.requests_started++;
  ssize_t sent = connection->tls ? tls_write(connection->tls, message, head + size)
                                 : send(connection->fd, message, head + size, MSG_NOSIGNAL);
  if (sent == (ssize_t)(head + size)) return;
  counters.broken++;
  note_error("send: %s", sent < 0 ? strerror(errno) : "only a part was taken");
  hang_up(connection, now_ns() + RETRY_NS);
}

static void keep_session(struct connection *connection) {
  void *session = tls_api.get1_session(connection->tls);
  if (!session) return;
  if (last_session) tls_api.session_free(last_session);
  last_session = session;
}

static void go_idle(struct connection *connection, uint64_t now) {
  if (settings.has_new_connections) {
    /* Tickets have come by now: TLS 1.3 sends them after the handshake. */
    if (settings.resumes_sessions) keep_session(connection);
    /* A session whose connection ends without a word is not resumed. */
    if (connection->tls) tls_api.shutdown(connection->tls);
    hang_up(connection, now);
    return;
  }
  connection->state = IDLE;
  if (settings.concurrency && now < end_ns + LINGER_NS) send_request(connection);
}

static void end_answer(struct connection *connection, uint64_t now) {
  bool is_whole = connection->num_received == connection->num_tokens && (connection->is_done || settings.is_unary);
  if (is_whole) {
    if (is_measured(now)) {
      counters.requests_finished++;
      record(&whole_latency, (int64_t)(now - connection->sent_ns));
    }
  } else if (connection->is_slow) {
    counters.slow_aborted++;
  } else {
    counters.short_answers++;
    note_error("answer of %u tokens instead of %u", connection->num_received, connection->num_tokens);
  }
  if (connection->framing == BY_CLOSE || !is_whole) {
    hang_up(connection, now + RETRY_NS);
  } else {
    go_idle(connection, now);
  }
}

/* ---- Answers ---- */

static void time_token(struct connection *connection, uint64_t now) {
  const volatile uint64_t *row = stamp_row(&stamps, connection->request);
  uint32_t index = connection->num_received;
  if (index == 0) {
    record(&ttft, (int64_t)(now - connection->sent_ns));
    record(&request_latency, (int64_t)(row[0] - connection->sent_ns));
    record(&added_ttft, (int64_t)(row[0] - connection->sent_ns) + (int64_t)(now - row[1]));
  } else {
    record(&gap, (int64_t)(now - connection->last_token_ns));
    record(&sent_gap, (int64_t)(row[1 + index] - row[index]));
  }
  record(&token_latency, (int64_t)(now - row[1 + index]));
}

static void take_text(struct connection *connection, const char *text, size_t size, uint64_t now) {
  if (size % PIECE_BYTES) note_error("text of %zu bytes", size), counters.wrong_tokens++;
  for (size_t at = 0; at + PIECE_BYTES <= size; at += PIECE_BYTES) {
    uint32_t index = connection->num_received;
    if (index >= connection->num_tokens ||
        memcmp(text + at, piece_of(&pieces, connection->request, index), PIECE_BYTES)) {
      counters.wrong_tokens++;
      note_error("token %u of %u is '%.*s'", index, connection->num_tokens, PIECE_BYTES, text + at);
      return;
    }
    if (is_measured(now)) {
      counters.tokens++;
      if (!connection->is_slow && !settings.is_unary) time_token(connection, now);
    }
    connection->num_received++;
    connection->last_token_ns = now;
  }
}

static void take_event_line(struct connection *connection, const char *line, size_t size, uint64_t now) {
  if (size < 6 || memcmp(line, "data: ", 6)) return;
  line += 6, size -= 6;
  if (size >= 6 && !memcmp(line, "[DONE]", 6)) {
    connection->is_done = true;
    return;
  }
  size_t text_size;
  const char *text = json_string(line, size, "\"text\":", &text_size);
  if (text) {
    take_text(connection, text, text_size, now);
  } else if (memmem(line, size, "\"error\":", 8)) {
    counters.error_events++;
    note_error("%.*s", (int)size, line);
  }
}

static void take_body(struct connection *connection, const char *data, size_t size, uint64_t now) {
  while (size) {
    const char *newline = settings.is_unary ? NULL : memchr(data, '\n', size);
    size_t part = newline ? (size_t)(newline - data) : size;
    if (connection->line_length + part > sizeof connection->line) die("line of more than %zu bytes", sizeof connection->line);
    if (newline && !connection->line_length) {
      take_event_line(connection, data, part, now);
    } else {
      memcpy(connection->line + connection->line_length, data, part);
      connection->line_length += (uint32_t)part;
      if (newline) take_event_line(connection, connection->line, connection->line_length, now);
    }
    if (newline) connection->line_length = 0, part++;
    data += part, size -= part;
  }
}

static void take_whole_answer(struct connection *connection, uint64_t now) {
  size_t size;
  const char *text = json_string(connection->line, connection->line_length, "\"text\":", &size);
  if (text) take_text(connection, text, size, now);
}

/* Takes the head; returns the bytes used, 0 while it is incomplete. */
static size_t take_head(struct connection *connection, const char *data, size_t size, uint64_t now) {
  const char *end = memmem(data, size, "\r\n\r\n", 4);
  if (!end) {
    if (size > 16384) die("head of an answer above 16 KiB");
    return 0;
  }
  size_t head_size = (size_t)(end + 4 - data);
  if (size < 12 || memcmp(data + 8, " 200", 4)) {
    if (is_measured(now)) counters.status_errors++;
    note_error("%.*s ... %.*s", 40, data, (int)(size - head_size > 150 ? 150 : size - head_size), end + 4);
    hang_up(connection, now + RETRY_NS);
    return size;
  }
  const char *length = header_value(data, head_size, "content-length");
  const char *coding = header_value(data, head_size, "transfer-encoding");
  connection->framing = coding ? BY_CHUNKS : length ? BY_LENGTH : BY_CLOSE;
  connection->left = length && !coding ? strtoul(length, NULL, 10) : 0;
  connection->is_in_chunk_size = true;
  connection->state = IN_BODY;
  return head_size;
}

/* Takes a line "SIZE\r\n" before a chunk; the last chunk ends the answer. Returns the bytes used, 0 while incomplete. */
static size_t take_chunk_size(struct connection *connection, const char *data, size_t size, bool *is_last) {
  const char *newline = memchr(data, '\n', size);
  if (!newline) return 0;
  size_t used = (size_t)(newline + 1 - data);
  if (used == 2) return used; /* the empty line after a chunk */
  connection->left = strtoul(data, NULL, 16);
  connection->is_in_chunk_size = false;
  if (connection->left) return used;
  if (used + 2 > size) { /* the empty line after the last chunk is still to come */
    connection->is_in_chunk_size = true;
    return 0;
  }
  *is_last = true;
  return used + 2;
}

/* Takes bytes of the body; returns the bytes used, 0 when more are needed. */
static size_t take_body_part(struct connection *connection, const char *data, size_t size, uint64_t now, bool *is_end) {
  if (connection->framing == BY_CHUNKS && connection->is_in_chunk_size)
    return take_chunk_size(connection, data, size, is_end);
  size_t part = connection->framing == BY_CLOSE || size < connection->left ? size : connection->left;
  take_body(connection, data, part, now);
  connection->left -= connection->framing == BY_CLOSE ? 0 : part;
  if (!connection->left && connection->framing == BY_LENGTH) *is_end = true;
  if (!connection->left && connection->framing == BY_CHUNKS) connection->is_in_chunk_size = true;
  return part;
}

static void stall(struct connection *connection, uint64_t now) {
  connection->is_stalled = true;
  connection->due_ns = now + (uint64_t)(settings.stall_s * 1e9);
  watch(connection, 0, EPOLL_CTL_MOD);
}

/* Takes what was read; *rest is what an incomplete head or chunk size leaves for the next time. */
static void take_bytes(struct connection *connection, const char *data, size_t size, uint64_t now, size_t *rest) {
  while (size && connection->state >= IN_HEAD) {
    bool is_end = false;
    size_t used = connection->state == IN_HEAD ? take_head(connection, data, size, now)
                                               : take_body_part(connection, data, size, now, &is_end);
    if (!used) break;
    data += used, size -= used;
    if (connection->state == CLOSED) return;
    if (connection->num_received >= connection->disconnect_at) {
      counters.disconnected += is_measured(now);
      hang_up(connection, now);
      return;
    }
    if (is_end) {
      if (settings.is_unary) take_whole_answer(connection, now);
      connection->line_length = 0;
      end_answer(connection, now);
    }
  }
  *rest = size;
}

/* Rests of framing between two reads are short and rare: they are kept by connection outside its hot part. */
static char *rests[MAX_CONNECTIONS];
static uint32_t rest_sizes[MAX_CONNECTIONS];

/* Returns whether something came. */
static bool receive(struct connection *connection) {
  static char buffer[RECEIVE_BYTES * 2];
  uint32_t id = (uint32_t)(connection - connections);
  size_t kept = rest_sizes[id], rest = 0;
  if (kept) memcpy(buffer, rests[id], kept);
  rest_sizes[id] = 0;
  size_t most = connection->is_slow ? 2048 : RECEIVE_BYTES;
  ssize_t size = connection->tls ? tls_read(connection->tls, buffer + kept, most)
                                 : recv(connection->fd, buffer + kept, most, 0);
  uint64_t now = now_ns();
  if (size <= 0) {
    if (size < 0 && errno == EAGAIN) {
      /* What was kept has been copied, and stays. */
      rest_sizes[id] = (uint32_t)kept;
      return false;
    }
    if (connection->state == IN_BODY && connection->framing == BY_CLOSE) {
      end_answer(connection, now);
    } else {
      if (connection->state >= IN_HEAD && !connection->is_slow) {
        if (is_measured(now)) counters.broken++;
        note_error("connection closed within an answer");
      }
      counters.slow_aborted += connection->state >= IN_HEAD && connection->is_slow;
      hang_up(connection, now + RETRY_NS);
    }
    return true;
  }
  uint32_t before = connection->num_received;
  take_bytes(connection, buffer, kept + (size_t)size, now, &rest);
  if (connection->state == CLOSED) return true;
  if (rest) {
    if (!rests[id]) rests[id] = allocate(NULL, RECEIVE_BYTES);
    if (rest > RECEIVE_BYTES) die("rest of %zu bytes", rest);
    memcpy(rests[id], buffer + kept + (size_t)size - rest, rest);
    rest_sizes[id] = (uint32_t)rest;
  }
  if (connection->is_slow && !before && connection->num_received) stall(connection, now);
  return true;
}

static void begin_requests(struct connection *connection) {
  counters.opened++;
  counters.resumed += connection->tls && tls_api.session_reused(connection->tls);
  connection->state = IDLE;
  send_request(connection);
}

static void shake_hands(struct connection *connection) {
  if (tls_connect(connection->tls) == 1) {
    begin_requests(connection);
  } else if (errno != EAGAIN) {
    counters.refused++;
    note_error("TLS handshake: %s", strerror(errno));
    hang_up(connection, now_ns() + RETRY_NS);
  }
}

static void serve(struct connection *connection, uint32_t events) {
  if (connection->state == CLOSED) return;
  if (connection->state == CONNECTING) {
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(connection->fd, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error || events & EPOLLERR) {
      counters.refused++;
      note_error("connect: %s", strerror(error));
      hang_up(connection, now_ns() + RETRY_NS);
      return;
    }
    watch(connection, EPOLLIN, EPOLL_CTL_MOD);
    rest_sizes[connection - connections] = 0;
    if (!settings.is_encrypted) {
      begin_requests(connection);
      return;
    }
    connection->tls = tls_api.new(tls_api.context);
    if (!connection->tls || !tls_api.set_fd(connection->tls, connection->fd)) die("TLS: no connection");
    if (settings.resumes_sessions && last_session) tls_api.set_session(connection->tls, last_session);
    connection->state = SHAKING_HANDS;
  }
  if (connection->state == SHAKING_HANDS) {
    shake_hands(connection);
    return;
  }
  while (receive(connection) && connection->tls && tls_api.has_pending(connection->tls)) continue;
}

/* ---- Time ---- */

static void open_due(uint64_t now) {
  for (uint32_t i = 0; i < num_connections; i++) {
    struct connection *connection = &connections[i];
    if (connection->is_stalled && now >= connection->due_ns) {
      connection->is_stalled = false;
      watch(connection, EPOLLIN, EPOLL_CTL_MOD);
    }
    if (connection->state == CLOSED && connection->is_retrying && now >= connection->due_ns && settings.concurrency)
      open_connection(connection);
    if (connection->state >= IN_HEAD && !connection->is_stalled && now > connection->last_token_ns + STUCK_NS) {
      counters.stuck++;
      note_error("nothing came for 60 s");
      hang_up(connection, now);
    }
  }
}

static struct connection *find_free_connection(void) {
  struct connection *closed = NULL;
  for (uint32_t i = 0; i < num_connections; i++) {
    if (connections[i].state == IDLE) return &connections[i];
    if (connections[i].state == CLOSED && !closed) closed = &connections[i];
  }
  return closed ? closed : num_connections < MAX_CONNECTIONS ? &connections[num_connections++] : NULL;
}

static void start_arrivals(uint64_t now) {
  while (settings.rate > 0 && next_arrival_ns <= now) {
    next_arrival_ns += (uint64_t)(-log(1 - uniform()) / settings.rate * 1e9);
    struct connection *connection = find_free_connection();
    if (!connection) {
      counters.dropped++;
    } else if (connection->state == IDLE) {
      send_request(connection);
    } else {
      connection->is_slow = uniform() * 100 < settings.slow_percent;
      open_connection(connection);
    }
  }
}

static void set_timer(int fd, uint64_t at_ns) {
  struct itimerspec setting = {{0, 0}, {(time_t)(at_ns / 1000000000u), (long)(at_ns % 1000000000u)}};
  timerfd_settime(fd, TFD_TIMER_ABSTIME, &setting, NULL);
}

static void announce(const char *what) {
  puts(what);
  fflush(stdout);
}

static void print_result(double cpu_s, uint64_t offered_tokens, uint64_t offered_requests) {
  double seconds = (double)(end_ns - begin_ns) / 1e9;
  printf("{\"seconds\":%.3f,\"cpu_s\":%.4f,\"offered_tokens\":%lu,\"offered_requests\":%lu", seconds, cpu_s,
         (unsigned long)offered_tokens, (unsigned long)offered_requests);
  printf(",\"tokens\":%lu,\"requests_started\":%lu,\"requests_finished\":%lu,\"disconnected\":%lu,\"slow_aborted\":%lu"
         ",\"opened\":%lu,\"resumed\":%lu",
         (unsigned long)counters.tokens, (unsigned long)counters.requests_started,
         (unsigned long)counters.requests_finished, (unsigned long)counters.disconnected,
         (unsigned long)counters.slow_aborted, (unsigned long)counters.opened, (unsigned long)counters.resumed);
  printf(",\"errors\":{\"dropped\":%lu,\"refused\":%lu,\"broken\":%lu,\"status\":%lu,\"short\":%lu,\"wrong_tokens\":%lu,"
         "\"error_events\":%lu,\"stuck\":%lu},\"first_error\":\"%s\"",
         (unsigned long)counters.dropped, (unsigned long)counters.refused, (unsigned long)counters.broken,
         (unsigned long)counters.status_errors, (unsigned long)counters.short_answers,
         (unsigned long)counters.wrong_tokens, (unsigned long)counters.error_events, (unsigned long)counters.stuck,
         first_error);
  print_histogram("token_latency", &token_latency);
  print_histogram("added_ttft", &added_ttft);
  print_histogram("request_latency", &request_latency);
  print_histogram("ttft", &ttft);
  print_histogram("itl", &gap);
  print_histogram("sent_gap", &sent_gap);
  print_histogram("whole_latency", &whole_latency);
  puts("}");
}

static double own_cpu_s(void) {
  struct rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
}

static void prepare_connections(uint64_t start_ns) {
  connections = calloc(MAX_CONNECTIONS, sizeof *connections);
  if (!connections) die("out of memory");
  num_connections = settings.concurrency;
  double ramp_ns = settings.warmup_s / 2 * 1e9;
  for (uint32_t i = 0; i < num_connections; i++) {
    connections[i].is_retrying = true;
    connections[i].is_first_of_connection = true;
    connections[i].is_slow = (i % 100) < settings.slow_percent;
    connections[i].due_ns = start_ns + (uint64_t)(ramp_ns * i / num_connections);
  }
}

static void run(void) {
  uint64_t start_ns = now_ns(), due_ns = start_ns;
  begin_ns = start_ns + (uint64_t)(settings.warmup_s * 1e9);
  end_ns = begin_ns + (uint64_t)(settings.seconds * 1e9);
  next_arrival_ns = start_ns;
  prepare_connections(start_ns);
  struct connection timer = {.fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)};
  watch(&timer, EPOLLIN, EPOLL_CTL_ADD);
  set_timer(timer.fd, start_ns + 1);
  bool has_begun = false, has_ended = false;
  double cpu_s = 0;
  uint64_t tokens_sent = 0, requests_read = 0;
  for (uint64_t now = start_ns; now < end_ns + LINGER_NS; now = now_ns()) {
    struct epoll_event events[256];
    int num_events = epoll_wait(epoll_fd, events, 256, -1);
    for (int i = 0; i < num_events; i++)
      if (events[i].data.ptr != &timer) serve(events[i].data.ptr, events[i].events);
    now = now_ns();
    if (!has_begun && now >= begin_ns) {
      has_begun = true;
      announce("begin");
      cpu_s = own_cpu_s();
      tokens_sent = stamps.header[STAMP_TOKENS_SENT];
      requests_read = stamps.header[STAMP_REQUESTS_READ];
    }
    if (!has_ended && now >= end_ns) {
      has_ended = true;
      announce("end");
      cpu_s = own_cpu_s() - cpu_s;
      tokens_sent = stamps.header[STAMP_TOKENS_SENT] - tokens_sent;
      requests_read = stamps.header[STAMP_REQUESTS_READ] - requests_read;
    }
    start_arrivals(now);
    if (now >= due_ns) {
      open_due(now);
      due_ns = now + 10 * TICK_NS;
    }
    set_timer(timer.fd, settings.rate > 0 && next_arrival_ns < due_ns ? next_arrival_ns : due_ns);
  }
  print_result(cpu_s, tokens_sent, requests_read);
}

/* ---- Calibration ---- */

static void calibrate(void) {
  enum { LOOPS = 100000000, MESSAGES = 100000 };
  volatile uint64_t sink;
  uint64_t value = 88172645463325252u, start = now_ns();
  for (uint32_t i = 0; i < LOOPS; i++) value ^= value << 13, value ^= value >> 7, value ^= value << 17;
  sink = value;
  (void)sink;
  double loop_ns = (double)(now_ns() - start) / LOOPS;
  int listener = socket(AF_INET, SOCK_STREAM, 0), sender = socket(AF_INET, SOCK_STREAM, 0), one = 1;
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  socklen_t size = sizeof address;
  if (bind(listener, (struct sockaddr *)&address, size) || listen(listener, 1) ||
      getsockname(listener, (struct sockaddr *)&address, &size) ||
      connect(sender, (struct sockaddr *)&address, size))
    die("loopback: %s", strerror(errno));
  int receiver = accept(listener, NULL, NULL);
  setsockopt(sender, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  char message[200] = {0};
  start = now_ns();
  for (uint32_t i = 0; i < MESSAGES; i++)
    if (send(sender, message, sizeof message, 0) < 0 || recv(receiver, message, sizeof message, MSG_WAITALL) < 0)
      die("loopback: %s", strerror(errno));
  printf("{\"loop_ns\":%.4f,\"send_receive_us\":%.4f}\n", loop_ns, (double)(now_ns() - start) / MESSAGES / 1000);
}

int main(int count, char **values) {
  if (has_option(count, values, "--calibrate")) {
    calibrate();
    return 0;
  }
  settings = (struct settings){
      .port = (uint16_t)number_option(count, values, "--port", 8000),
      .num_ports = (uint32_t)number_option(count, values, "--ports", 1),
      .concurrency = (uint32_t)number_option(count, values, "--concurrency", 0),
      .num_tokens = (uint32_t)number_option(count, values, "--tokens", 200),
      .prompt_tokens = (uint32_t)number_option(count, values, "--prompt-tokens", 128),
      .rate = number_option(count, values, "--rate", 0),
      .slow_percent = number_option(count, values, "--slow-percent", 0),
      .disconnect_percent = number_option(count, values, "--disconnect-percent", 0),
      .stall_s = number_option(count, values, "--stall-s", 5),
      .warmup_s = number_option(count, values, "--warmup-s", 3),
      .seconds = number_option(count, values, "--seconds", 5),
      .is_unary = has_option(count, values, "--unary"),
      .is_encrypted = has_option(count, values, "--tls"),
      .has_new_connections = has_option(count, values, "--new-connections"),
      .resumes_sessions = has_option(count, values, "--resume-sessions"),
      .model = option(count, values, "--model", "tiny"),
      .api_key = option(count, values, "--api-key", ""),
  };
  if ((settings.concurrency > 0) == (settings.rate > 0)) die("give one of --concurrency and --rate");
  if (settings.concurrency > MAX_CONNECTIONS) die("--concurrency: at most %d", MAX_CONNECTIONS);
  if (!settings.num_tokens || !settings.prompt_tokens || !settings.num_ports) die("counts are above 0");
  if (settings.resumes_sessions && !settings.is_encrypted) die("--resume-sessions needs --tls");
  if (strlen(settings.api_key) > 512) die("--api-key: at most 512 characters");
  if (settings.is_encrypted) load_tls();
  pieces = load_pieces(option(count, values, "--pieces", NULL));
  stamps = map_stamps(option(count, values, "--stamps", NULL));
  if (settings.num_tokens >= stamps.columns) die("--tokens: the table of stamps holds %lu", (unsigned long)stamps.columns - 1);
  random_state = (uint64_t)number_option(count, values, "--seed", 1) * 0x9e3779b97f4a7c15u + 1;
  epoll_fd = epoll_create1(EPOLL_CLOEXEC);
  run();
  return 0;
}
