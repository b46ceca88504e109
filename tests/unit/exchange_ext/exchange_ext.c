/* Array types that offer DLPack's C exchange API themselves, as no array library but torch does today: what they
 * export, and how, is chosen by the test. Compiled by test_tensor_intake.py.
 *
 * Array(shape, dtype=(code, bits, lanes), strides=None, device=(type, index), byte_offset=0, flags=0, major=1,
 * null=False)
 *
 *   Array       exports views;
 *   Owning      has no function for views, so that owned tensors must be taken;
 *   Chained     has a table of a major version that nobody knows, before one of version 1;
 *   Unknown     has only a table of a major version that nobody knows.
 *
 * live() is the number of owned tensors that are not given back. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MAX_DIMENSIONS 4

typedef struct {
  uint32_t major, minor;
} Version;

typedef struct {
  void* data;
  int32_t device_type, device_index;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} View;

typedef struct Managed {
  Version version;
  void* context;
  void (*deleter)(struct Managed*);
  uint64_t flags;
  View view;
} Managed;

typedef struct Header {
  Version version;
  const struct Header* previous;
} Header;

typedef struct {
  Header header;
  void* allocate;
  int (*managed_from_object)(void*, Managed**);
  void* to_object;
  int (*view_from_object)(void*, View*);
  int (*current_stream)(int32_t, int32_t, void**);
} Api;

typedef struct {
  PyObject_HEAD View view;
  int64_t shape[MAX_DIMENSIONS], strides[MAX_DIMENSIONS];
  unsigned long long flags;
  unsigned int major;
  char memory[256];
} Array;

static long live_count = 0;

static int fill_view(void* object, View* out) {
  *out = ((Array*)object)->view;
  return 0;
}

static void delete_managed(Managed* managed) {
  Py_DECREF((PyObject*)managed->context);
  free(managed);
  --live_count;
}

static int make_managed(void* object, Managed** out) {
  Array* array = object;
  Managed* managed = calloc(1, sizeof *managed);
  if (managed == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  managed->version.major = array->major;
  managed->context = Py_NewRef((PyObject*)object);
  managed->deleter = delete_managed;
  managed->flags = array->flags;
  managed->view = array->view;
  ++live_count;
  *out = managed;
  return 0;
}

/* The stream of a device is 0x1000 and its index; index 7 has none. */
static int current_stream(int32_t type, int32_t index, void** out) {
  (void)type;
  if (index == 7) {
    PyErr_SetString(PyExc_RuntimeError, "device 7 has no stream\nframe #0: somewhere in a library");
    return -1;
  }
  *out = (void*)(uintptr_t)(0x1000 + index);
  return 0;
}

static const Api viewing = {{{1, 3}, NULL}, NULL, make_managed, NULL, fill_view, current_stream};
static const Api owning = {{{1, 2}, NULL}, NULL, make_managed, NULL, NULL, current_stream};
static const Header chained = {{9, 0}, &viewing.header};
static const Header unknown = {{9, 0}, NULL};

static int read_numbers(PyObject* tuple, int64_t* out, int32_t* count) {
  Py_ssize_t n = PyTuple_Size(tuple);
  if (n < 0) return -1;
  if (n > MAX_DIMENSIONS) {
    PyErr_SetString(PyExc_ValueError, "at most four dimensions");
    return -1;
  }
  for (Py_ssize_t i = 0; i < n; ++i) {
    out[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
    if (out[i] == -1 && PyErr_Occurred()) return -1;
  }
  *count = (int32_t)n;
  return 0;
}

static int array_init(PyObject* self, PyObject* args, PyObject* keywords) {
  static char* names[] = {"shape", "dtype", "strides", "device", "byte_offset", "flags", "major", "null", NULL};
  Array* array = (Array*)self;
  View* view = &array->view;
  PyObject *shape = NULL, *strides = Py_None;
  int code = 2, bits = 32, lanes = 1, device_type = 1, device_index = 0, null = 0;
  unsigned long long byte_offset = 0;
  int32_t stride_count = 0;
  array->flags = 0;
  array->major = 1;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!|(iii)O(ii)KKIp", names, &PyTuple_Type, &shape, &code, &bits,
                                   &lanes, &strides, &device_type, &device_index, &byte_offset, &array->flags,
                                   &array->major, &null)) {
    return -1;
  }
  if (read_numbers(shape, array->shape, &view->ndim) < 0) return -1;
  if (strides != Py_None && read_numbers(strides, array->strides, &stride_count) < 0) return -1;
  view->data = null ? NULL : array->memory;
  view->device_type = device_type;
  view->device_index = device_index;
  view->code = (uint8_t)code;
  view->bits = (uint8_t)bits;
  view->lanes = (uint16_t)lanes;
  view->shape = array->shape;
  view->strides = strides == Py_None ? NULL : array->strides;
  view->byte_offset = byte_offset;
  return 0;
}

static void array_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
  release(self);
  Py_DECREF(type);
}

static PyObject* array_address(PyObject* self, PyObject* unused) {
  (void)unused;
  return PyLong_FromVoidPtr(((Array*)self)->memory);
}

static PyMethodDef array_methods[] = {{"address", array_address, METH_NOARGS, "Where the memory begins."},
                                      {NULL, NULL, 0, NULL}};
static PyType_Slot array_slots[] = {
    {Py_tp_init, (void*)array_init}, {Py_tp_dealloc, (void*)array_dealloc}, {Py_tp_methods, array_methods}, {0, NULL}};

static int add_type(PyObject* module, const char* full_name, const void* api) {
  PyType_Spec spec = {full_name, sizeof(Array), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, array_slots};
  PyObject* type = PyType_FromSpec(&spec);
  PyObject* capsule = PyCapsule_New((void*)api, "dlpack_exchange_api", NULL);
  int failed = type == NULL || capsule == NULL ||
               PyObject_SetAttrString(type, "__dlpack_c_exchange_api__", capsule) < 0 ||
               PyObject_SetAttrString(module, strchr(full_name, '.') + 1, type) < 0;
  Py_XDECREF(capsule);
  Py_XDECREF(type);
  return failed ? -1 : 0;
}

static PyObject* live(PyObject* module, PyObject* unused) {
  (void)module;
  (void)unused;
  return PyLong_FromLong(live_count);
}

static PyMethodDef functions[] = {{"live", live, METH_NOARGS, "Owned tensors that are not given back."},
                                  {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "exchange_ext", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_exchange_ext(void) {
  PyObject* module = PyModule_Create(&definition);
  if (module == NULL) return NULL;
  if (add_type(module, "exchange_ext.Array", &viewing) < 0 || add_type(module, "exchange_ext.Owning", &owning) < 0 ||
      add_type(module, "exchange_ext.Chained", &chained) < 0 ||
      add_type(module, "exchange_ext.Unknown", &unknown) < 0) {
    Py_DECREF(module);
    return NULL;
  }
  return module;
}
