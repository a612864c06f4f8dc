// Softmax attention of packed sequences and its gradients, for the cores of the host; jit_cpu.py compiles and calls it.
//
// Scores are computed for a block of queries and keys at a time, after Dao, "FlashAttention-2: Faster Attention with
// Better Parallelism and Work Partitioning" (arXiv 2307.08691), algorithms 1 and 2. Keys are the outer loop in both
// passes, so that a block of them is copied once: to float32, with rows that vectors fit, and turned. All products and
// sums are of float32. A sequence and a head of keys are one task, so results don't depend on the number of threads.

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <tuple>
#include <type_traits>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t WIDTH = Vec::size();
constexpr int64_t PADDED = 16;                      // rows and columns are padded to multiples of it
constexpr int64_t QUERIES = 64, KEYS = 512;         // of a block
constexpr int64_t TILE_ROWS = 8, TILE_VECTORS = 2;  // of sums that stay in registers, of which AVX-512 has 32
constexpr float INF = std::numeric_limits<float>::infinity();
static_assert(PADDED % WIDTH == 0 && PADDED % TILE_ROWS == 0 && QUERIES % PADDED == 0 && KEYS % PADDED == 0);

int64_t padded(int64_t count) { return (count + PADDED - 1) / PADDED * PADDED; }

enum Dtype : int64_t { FLOAT32, BFLOAT16, FLOAT16 };

}  // namespace

// A tensor [rows, tokens, heads, size], whose last dimension is contiguous; strides count elements. jit_cpu.py makes an
// array of numbers in this order of it, and of a Task.
struct Tensor {
  char* data;
  int64_t row, token, head;
};

// What is computed.
struct Task {
  const int64_t* lengths;     // of packed sequences [sequences, 3]: queries, keys, whether they are padding, which sees
                              // nothing; null: each row is a sequence
  int64_t sequences;
  int64_t queries, keys;      // of a row
  int64_t key_heads, groups;  // query heads are key_heads × groups
  int64_t size, value_size;   // of a head
  int64_t dtype;              // of all tensors but log-sum-exps, which are float32
  int64_t is_banded;          // query x sees key y if 0 <= offset + x - y < window; otherwise all
  int64_t offset, window;
  int64_t threads;
};
static_assert(sizeof(Task) == 13 * sizeof(int64_t) && sizeof(Tensor) == 4 * sizeof(int64_t));

namespace {

// One sequence and one head of keys.
struct Part {
  int64_t row, first_query, queries, first_key, keys, head;
  bool is_padding;
};

struct Range {
  int64_t begin, end;
  bool is_empty() const { return end <= begin; }
};

// The keys that at least one of the queries from `first` to `last` sees.
Range seen(const Task& task, int64_t first, int64_t last, int64_t keys) {
  if (!task.is_banded) return {0, keys};
  const int64_t begin = task.offset + first - task.window + 1, end = task.offset + last + 1;
  return {std::clamp<int64_t>(begin, 0, keys), std::clamp<int64_t>(end, 0, keys)};
}

int64_t bytes_of(const Task& task) { return task.dtype == FLOAT32 ? 4 : 2; }

int64_t place_of(const Tensor& tensor, int64_t row, int64_t token, int64_t head) {
  return row * tensor.row + token * tensor.token + head * tensor.head;
}

char* row_at(const Task& task, const Tensor& tensor, int64_t row, int64_t token, int64_t head) {
  return tensor.data + place_of(tensor, row, token, head) * bytes_of(task);
}

float& sum_at(const Tensor& tensor, int64_t row, int64_t token, int64_t head) {
  return reinterpret_cast<float*>(tensor.data)[place_of(tensor, row, token, head)];
}

// --- between the tensors' dtype and float32

template <typename T>
Vec load(const T* from, int64_t count) {
  if constexpr (std::is_same_v<T, float>) {
    return Vec::loadu(from, count);
  } else {
    const auto loaded = at::vec::Vectorized<T>::loadu(from, count);
    return Vec::set(Vec(0.f), std::get<0>(at::vec::convert_to_float<T>(loaded)), count);
  }
}

template <typename T>
void store(Vec values, T* to, int64_t count) {
  if constexpr (std::is_same_v<T, float>) {
    values.store(to, count);
  } else {
    at::vec::convert_from_float<T>(values, values).store(to, count);
  }
}

template <typename Function>
void by_dtype(const Task& task, Function function) {
  switch (task.dtype) {
    case FLOAT32: return function(float());
    case BFLOAT16: return function(c10::BFloat16());
    default: return function(c10::Half());
  }
}

// Copy `count` tokens times `factor`; what pads columns from `size` on and rows from `count` on is zero.
void widen(const Task& task, const Tensor& tensor, int64_t row, int64_t token, int64_t head, int64_t count,
           int64_t size, float factor, float* to) {
  const int64_t columns = padded(size);
  by_dtype(task, [&](auto kind) {
    using T = decltype(kind);
    for (int64_t n = 0; n < count; ++n) {
      const T* from = reinterpret_cast<const T*>(row_at(task, tensor, row, token + n, head));
      for (int64_t i = 0; i < columns; i += WIDTH) {
        const int64_t left = std::clamp<int64_t>(size - i, 0, WIDTH);
        (left ? load(from + i, left) * Vec(factor) : Vec(0.f)).store(to + n * columns + i);
      }
    }
  });
  std::memset(to + count * columns, 0, sizeof(float) * (padded(count) - count) * columns);
}

// Write a row of `size` numbers times `factor`.
void narrow(const Task& task, const float* from, int64_t size, float factor, char* to) {
  by_dtype(task, [&](auto kind) {
    using T = decltype(kind);
    for (int64_t i = 0; i < size; i += WIDTH)
      store(Vec::loadu(from + i) * Vec(factor), reinterpret_cast<T*>(to) + i, std::min(WIDTH, size - i));
  });
}

// The product of two rows.
float dot(const Task& task, const char* left, const char* right, int64_t size) {
  Vec sum(0.f);
  by_dtype(task, [&](auto kind) {
    using T = decltype(kind);
    for (int64_t i = 0; i < size; i += WIDTH) {
      const int64_t left_over = std::min(WIDTH, size - i);
      sum = at::vec::fmadd(load(reinterpret_cast<const T*>(left) + i, left_over),
                           load(reinterpret_cast<const T*>(right) + i, left_over), sum);
    }
  });
  return at::vec::vec_reduce_all<float>([](Vec& x, Vec& y) { return x + y; }, sum);
}

// --- matrix products

struct Matrix {
  float* data;
  int64_t row, column;  // strides; those that are the second factor or the result have contiguous rows
  float* at(int64_t i, int64_t j) const { return data + i * row + j * column; }
};

template <int VECTORS, bool ADDS>
void tile(int64_t inner, const Matrix& a, const Matrix& b, const Matrix& c) {
  Vec sums[TILE_ROWS][VECTORS];
#pragma GCC unroll 8
  for (int64_t i = 0; i < TILE_ROWS; ++i)
#pragma GCC unroll 8
    for (int64_t j = 0; j < VECTORS; ++j) sums[i][j] = ADDS ? Vec::loadu(c.data + i * c.row + j * WIDTH) : Vec(0.f);
  for (int64_t k = 0; k < inner; ++k) {
    Vec right[VECTORS];
#pragma GCC unroll 8
    for (int64_t j = 0; j < VECTORS; ++j) right[j] = Vec::loadu(b.data + k * b.row + j * WIDTH);
#pragma GCC unroll 8
    for (int64_t i = 0; i < TILE_ROWS; ++i) {
      const Vec left(*a.at(i, k));
#pragma GCC unroll 8
      for (int64_t j = 0; j < VECTORS; ++j) sums[i][j] = at::vec::fmadd(left, right[j], sums[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int64_t i = 0; i < TILE_ROWS; ++i)
#pragma GCC unroll 8
    for (int64_t j = 0; j < VECTORS; ++j) sums[i][j].store(c.data + i * c.row + j * WIDTH);
}

// c [rows, columns] = a [rows, inner] · b [inner, columns], added to c if ADDS; rows and columns are padded.
template <bool ADDS>
void multiply(int64_t rows, int64_t columns, int64_t inner, const Matrix& a, const Matrix& b, const Matrix& c) {
  int64_t j = 0;
  const auto strip = [&](auto vectors) {
    for (int64_t i = 0; i < rows; i += TILE_ROWS)
      tile<decltype(vectors)::value, ADDS>(inner, {a.at(i, 0), a.row, a.column}, {b.at(0, j), b.row, 1},
                                           {c.at(i, j), c.row, 1});
    j += decltype(vectors)::value * WIDTH;
  };
  while (j + TILE_VECTORS * WIDTH <= columns) strip(std::integral_constant<int, TILE_VECTORS>());
  while (j < columns) strip(std::integral_constant<int, 1>());
}

// Write the transpose of [rows, columns], both padded; rows of the result are `rows` apart.
void turn(const float* from, int64_t rows, int64_t columns, float* to) {
  for (int64_t i = 0; i < rows; i += PADDED)
    for (int64_t j = 0; j < columns; j += PADDED)
      at::vec::transpose_mxn<float>(from + i * columns + j, columns, to + j * rows + i, rows, PADDED, PADDED);
}

// --- memory of a thread

// Hands out parts of a block of memory, or only counts them if there is none yet.
struct Arena {
  float* base;
  int64_t used = 0;
  float* take(int64_t count) {
    float* taken = base ? base + used : nullptr;
    used += padded(count);
    return taken;
  }
};

struct Memory {
  explicit Memory(int64_t floats)
      : data(static_cast<float*>(::operator new(sizeof(float) * floats, std::align_val_t(64)))) {}
  Memory(const Memory&) = delete;
  ~Memory() { ::operator delete(data, std::align_val_t(64)); }
  float* data;
};

// Call `row` for each query of a block, padding included, with what it sees of a block of keys, counted from its begin.
template <typename Row>
void each_row(const Task& task, const Part& part, int64_t first_query, int64_t queries, int64_t first_key, Range block,
              Row row) {
  for (int64_t i = 0; i < padded(queries); ++i) {
    Range range{0, 0};
    if (i < queries) {
      range = seen(task, first_query + i, first_query + i, part.keys);
      range = {std::max(range.begin - first_key, block.begin) - block.begin,
               std::min(range.end - first_key, block.end) - block.begin};
    }
    row(i, range);
  }
}

void hide(float* scores, Range seen, int64_t columns) {
  std::fill(scores, scores + seen.begin, -INF);
  std::fill(scores + seen.end, scores + columns, -INF);
}

// Call `block` for each block of queries that sees any of the keys [first_key, first_key + keys).
template <typename Block>
void each_block(const Task& task, const Part& part, int64_t first_key, int64_t keys, Block block) {
  if (part.is_padding) return;
  for (int64_t group = 0; group < task.groups; ++group)
    for (int64_t first = 0; first < part.queries; first += QUERIES) {
      const int64_t count = std::min(QUERIES, part.queries - first);
      const Range all = seen(task, first, first + count - 1, part.keys);
      const Range here{std::max<int64_t>(all.begin - first_key, 0) / PADDED * PADDED,
                       std::min(all.end - first_key, keys)};
      if (!here.is_empty()) block(group, first, count, here);
    }
}

// --- the forward pass

struct Forward {
  Forward(Arena& arena, const Task& task, int64_t rows)
      : columns(padded(task.size)), value_columns(padded(task.value_size)),
        keys(arena.take(KEYS * columns)), turned(arena.take(KEYS * columns)),
        values(arena.take(KEYS * value_columns)), queries(arena.take(QUERIES * columns)),
        scores(arena.take(QUERIES * KEYS)), sums(arena.take(rows * value_columns)), tops(arena.take(rows)),
        totals(arena.take(rows)) {}

  void run(const Task& task, float scale, const Tensor* tensors, const Part& part) {
    const Tensor &query = tensors[0], &key = tensors[1], &value = tensors[2], &out = tensors[3], &lse = tensors[4];
    const int64_t per_group = padded(part.queries), used = per_group * task.groups;
    std::memset(sums, 0, sizeof(float) * used * value_columns);
    std::memset(totals, 0, sizeof(float) * used);
    std::fill(tops, tops + used, -INF);
    for (int64_t first_key = 0; first_key < part.keys; first_key += KEYS) {
      const int64_t count = std::min(KEYS, part.keys - first_key), apart = padded(count);
      widen(task, key, part.row, part.first_key + first_key, part.head, count, task.size, scale, keys);
      turn(keys, apart, columns, turned);
      widen(task, value, part.row, part.first_key + first_key, part.head, count, task.value_size, 1.f, values);
      each_block(task, part, first_key, count, [&](int64_t group, int64_t first, int64_t number, Range block) {
        const int64_t head = part.head * task.groups + group, width = padded(block.end) - block.begin;
        const int64_t place = group * per_group + first;
        widen(task, query, part.row, part.first_query + first, head, number, task.size, 1.f, queries);
        multiply<false>(padded(number), width, task.size, {queries, columns, 1}, {turned + block.begin, apart, 1},
                        {scores, KEYS, 1});
        each_row(task, part, first, number, first_key, block, [&](int64_t i, Range range) {
          weigh(scores + i * KEYS, range, width, place + i);
        });
        multiply<true>(padded(number), value_columns, width, {scores, KEYS, 1},
                       {values + block.begin * value_columns, value_columns, 1},
                       {sums + place * value_columns, value_columns, 1});
      });
    }
    for (int64_t group = 0; group < task.groups; ++group)
      for (int64_t i = 0; i < part.queries; ++i) {
        const int64_t head = part.head * task.groups + group, place = group * per_group + i;
        const float total = totals[place];  // zero: no key was seen
        narrow(task, sums + place * value_columns, task.value_size, total == 0 ? 0.f : 1 / total,
               row_at(task, out, part.row, part.first_query + i, head));
        sum_at(lse, part.row, part.first_query + i, head) = tops[place] + std::log(total);
      }
  }

 private:
  // Make weights of a row's scores, below the largest score so far, and rescale what was summed below a smaller one.
  void weigh(float* row, Range range, int64_t width, int64_t place) {
    if (range.is_empty()) {
      std::memset(row, 0, sizeof(float) * width);
      return;
    }
    hide(row, range, width);
    Vec top(-INF);
    for (int64_t j = 0; j < width; j += WIDTH) top = at::vec::maximum(top, Vec::loadu(row + j));
    const float before = tops[place];
    const float now = std::max(
        before, at::vec::vec_reduce_all<float>([](Vec& x, Vec& y) { return at::vec::maximum(x, y); }, top));
    Vec total(0.f);
    for (int64_t j = 0; j < width; j += WIDTH) {
      const Vec weight = (Vec::loadu(row + j) - Vec(now)).exp_u20();
      weight.store(row + j);
      total = total + weight;
    }
    if (totals[place] != 0 && before != now) {
      const float factor = std::exp(before - now);
      totals[place] *= factor;
      float* sum = sums + place * value_columns;
      for (int64_t j = 0; j < value_columns; j += WIDTH) (Vec::loadu(sum + j) * Vec(factor)).store(sum + j);
    }
    totals[place] += at::vec::vec_reduce_all<float>([](Vec& x, Vec& y) { return x + y; }, total);
    tops[place] = now;
  }

  int64_t columns, value_columns;
  float *keys, *turned, *values, *queries, *scores, *sums, *tops, *totals;
};

// --- the backward pass

struct Backward {
  Backward(Arena& arena, const Task& task, int64_t rows)
      : columns(padded(task.size)), value_columns(padded(task.value_size)),
        keys(arena.take(KEYS * columns)), turned_keys(arena.take(KEYS * columns)),
        values(arena.take(KEYS * value_columns)), turned_values(arena.take(KEYS * value_columns)),
        of_keys(arena.take(KEYS * columns)), of_values(arena.take(KEYS * value_columns)),
        queries(arena.take(QUERIES * columns)), of_out(arena.take(QUERIES * value_columns)),
        weights(arena.take(QUERIES * KEYS)), of_scores(arena.take(QUERIES * KEYS)),
        of_queries(arena.take(rows * columns)), deltas(arena.take(rows)) {}

  void run(const Task& task, float scale, const Tensor* tensors, const Part& part) {
    const Tensor &query = tensors[0], &key = tensors[1], &value = tensors[2], &grad_out = tensors[3], &out = tensors[4],
               &lse = tensors[5], &grad_query = tensors[6], &grad_key = tensors[7], &grad_value = tensors[8];
    const int64_t per_group = padded(part.queries);
    std::memset(of_queries, 0, sizeof(float) * per_group * task.groups * columns);
    for (int64_t group = 0; group < task.groups; ++group)
      for (int64_t i = 0; i < part.queries; ++i) {
        const int64_t token = part.first_query + i, head = part.head * task.groups + group;
        deltas[group * per_group + i] =
            dot(task, row_at(task, grad_out, part.row, token, head), row_at(task, out, part.row, token, head),
                task.value_size);
      }
    for (int64_t first_key = 0; first_key < part.keys; first_key += KEYS) {
      const int64_t count = std::min(KEYS, part.keys - first_key), apart = padded(count);
      widen(task, key, part.row, part.first_key + first_key, part.head, count, task.size, scale, keys);
      turn(keys, apart, columns, turned_keys);
      widen(task, value, part.row, part.first_key + first_key, part.head, count, task.value_size, 1.f, values);
      turn(values, apart, value_columns, turned_values);
      std::memset(of_keys, 0, sizeof(float) * apart * columns);
      std::memset(of_values, 0, sizeof(float) * apart * value_columns);
      each_block(task, part, first_key, count, [&](int64_t group, int64_t first, int64_t number, Range block) {
        const int64_t head = part.head * task.groups + group, token = part.first_query + first;
        const int64_t width = padded(block.end) - block.begin, height = padded(number);
        const int64_t place = group * per_group + first;
        widen(task, query, part.row, token, head, number, task.size, 1.f, queries);
        widen(task, grad_out, part.row, token, head, number, task.value_size, 1.f, of_out);
        multiply<false>(height, width, task.size, {queries, columns, 1}, {turned_keys + block.begin, apart, 1},
                        {weights, KEYS, 1});
        multiply<false>(height, width, task.value_size, {of_out, value_columns, 1},
                        {turned_values + block.begin, apart, 1}, {of_scores, KEYS, 1});
        each_row(task, part, first, number, first_key, block, [&](int64_t i, Range range) {
          float *weight = weights + i * KEYS, *of_score = of_scores + i * KEYS;
          if (range.is_empty()) {
            std::memset(weight, 0, sizeof(float) * width);
            std::memset(of_score, 0, sizeof(float) * width);
            return;
          }
          hide(weight, range, width);
          const Vec sum(sum_at(lse, part.row, token + i, head)), delta(deltas[place + i]);
          for (int64_t j = 0; j < width; j += WIDTH) {
            const Vec part_of = (Vec::loadu(weight + j) - sum).exp_u20();
            (part_of * (Vec::loadu(of_score + j) - delta)).store(of_score + j);
            part_of.store(weight + j);
          }
        });
        multiply<true>(width, value_columns, height, {weights, 1, KEYS}, {of_out, value_columns, 1},
                       {of_values + block.begin * value_columns, value_columns, 1});
        multiply<true>(width, columns, height, {of_scores, 1, KEYS}, {queries, columns, 1},
                       {of_keys + block.begin * columns, columns, 1});
        multiply<true>(height, columns, width, {of_scores, KEYS, 1}, {keys + block.begin * columns, columns, 1},
                       {of_queries + place * columns, columns, 1});
      });
      for (int64_t i = 0; i < count; ++i) {
        const int64_t token = part.first_key + first_key + i;
        narrow(task, of_keys + i * columns, task.size, scale, row_at(task, grad_key, part.row, token, part.head));
        narrow(task, of_values + i * value_columns, task.value_size, 1.f,
               row_at(task, grad_value, part.row, token, part.head));
      }
    }
    for (int64_t group = 0; group < task.groups; ++group)
      for (int64_t i = 0; i < part.queries; ++i)
        narrow(task, of_queries + (group * per_group + i) * columns, task.size, 1.f,
               row_at(task, grad_query, part.row, part.first_query + i, part.head * task.groups + group));
  }

 private:
  int64_t columns, value_columns;
  float *keys, *turned_keys, *values, *turned_values, *of_keys, *of_values, *queries, *of_out, *weights, *of_scores,
      *of_queries, *deltas;
};

int64_t thread_number() {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}

// Compute all sequences and heads; returns 0, or the bytes that the system didn't have.
template <typename Pass>
int64_t compute(const Task& task, float scale, const Tensor* tensors) {
  std::vector<Part> parts;
  int64_t first_query = 0, first_key = 0, longest = 0;
  for (int64_t i = 0; i < task.sequences; ++i) {
    const int64_t row[] = {task.queries, task.keys, 0}, *lengths = task.lengths ? task.lengths + 3 * i : row;
    const int64_t queries = lengths[0], keys = lengths[1];
    for (int64_t head = 0; head < task.key_heads; ++head)
      parts.push_back({task.lengths ? 0 : i, first_query, queries, first_key, keys, head, lengths[2] != 0});
    first_query += task.lengths ? queries : 0;
    first_key += task.lengths ? keys : 0;
    longest = std::max(longest, queries);
  }
  Arena counted{nullptr};
  const int64_t rows = padded(longest) * task.groups;
  Pass(counted, task, rows);
  const int64_t number = parts.size(), threads = std::max<int64_t>(1, std::min(task.threads, number));
  try {
    const Memory memory(counted.used * threads);
#pragma omp parallel num_threads(threads)
    {
      Arena arena{memory.data + thread_number() * counted.used};
      Pass pass(arena, task, rows);
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < number; ++i) pass.run(task, scale, tensors, parts[i]);
    }
  } catch (const std::bad_alloc&) {
    return sizeof(float) * counted.used * threads;
  }
  return 0;
}

}  // namespace

// Tensors: query, key, value, out, log-sum-exp.
extern "C" int64_t attention_forward(const Task* task, float scale, const Tensor* tensors) {
  return compute<Forward>(*task, scale, tensors);
}

// Tensors: query, key, value, gradient of out, out, log-sum-exp, and the gradients of query, key and value.
extern "C" int64_t attention_backward(const Task* task, float scale, const Tensor* tensors) {
  return compute<Backward>(*task, scale, tensors);
}
